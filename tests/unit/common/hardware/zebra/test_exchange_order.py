"""Launch order of a zebra gang's exchanges: no exchange waits for a later one."""

from __future__ import annotations

from itertools import product

import pytest

from meshrl.common.hardware.zebra.schedule import (
    LaneKind,
    ScheduledExchange,
    ScheduledTask,
    TaskKind,
    order_attention_tasks,
    order_exchanges,
    order_expert_tasks,
)

SHAPES = [*product((1, 2, 3), (1, 2, 3, 4)), (2, 7)]  # layers, micro-batches


def run_one_by_one(
    order: list[ScheduledExchange], tasks: list[list[ScheduledTask]], layers: int
) -> None:
    """Run exchanges one by one, and between them all tasks that can run; assert that none waits."""
    received: set[ScheduledExchange] = set()
    done: list[set[ScheduledTask]] = [set() for _ in tasks]
    for exchange in order:
        for own, finished in zip(tasks, done, strict=True):
            for task in own[len(finished) :]:
                if not list_inputs(task, layers) <= received:
                    break
                finished.add(task)
        for own, finished in zip(tasks, done, strict=True):
            sources = {task for task in own if exchange in list_outputs(task, layers)}
            assert sources <= finished, exchange
        received.add(exchange)


def list_inputs(task: ScheduledTask, layers: int) -> set[ScheduledExchange]:
    backward, layer, micro, kind = task
    if kind is not TaskKind.ATTENTION:
        return {ScheduledExchange(LaneKind.DISPATCH, backward, layer, micro)}
    if backward:
        own = ScheduledExchange(LaneKind.COMBINE, True, layer, micro)
        return {own} if layer < layers else set()
    return {ScheduledExchange(LaneKind.COMBINE, False, layer - 1, micro)} if layer else set()


def list_outputs(task: ScheduledTask, layers: int) -> set[ScheduledExchange]:
    backward, layer, micro, kind = task
    if kind is not TaskKind.ATTENTION:
        return {ScheduledExchange(LaneKind.COMBINE, backward, layer, micro)}
    if backward:
        own = ScheduledExchange(LaneKind.DISPATCH, True, layer - 1, micro)
        return {own} if layer else set()
    return {ScheduledExchange(LaneKind.DISPATCH, False, layer, micro)} if layer < layers else set()


@pytest.mark.parametrize(("layers", "micro_batches"), SHAPES)
def test_no_exchange_depends_on_a_later_one(layers: int, micro_batches: int) -> None:
    for hosted in product((False, True), repeat=layers):
        order = order_exchanges(layers, micro_batches, hosted)
        assert len(set(order)) == len(order) == 4 * layers * micro_batches
        attention = order_attention_tasks(layers, micro_batches, hosted)
        experts = order_expert_tasks(layers, micro_batches)
        for lane in LaneKind:
            assert [one[1:] for one in order if one.lane is lane] == [one[:3] for one in experts]
        run_one_by_one(order, [attention, experts], layers)


def test_lanes_are_ahead_of_the_tasks_that_wait_for_them() -> None:
    order = order_exchanges(4, 4)
    tasks = order_expert_tasks(4, 4)
    for number, task in enumerate(tasks[:-4]):
        place = order.index(ScheduledExchange(LaneKind.COMBINE, *task[:3]))
        # The experts' next rows are launched before, those that need this combine after it.
        before = {one[1:] for one in order[:place] if one.lane is LaneKind.DISPATCH}
        assert tasks[number + 1][:3] in before and tasks[number + 3][:3] not in before
