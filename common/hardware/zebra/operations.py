"""Simulation of a step whose ranks compute tasks in any given order, for comparison.

`schedule.py` has the order that it is compared with. Attention ranks and expert ranks have one
compute stream each. Transfers towards experts use the dispatch stream, those back the combine
stream, forward and backward alike. A combine is a collective of all ranks, so it also waits for
experts that attention ranks host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from enum import IntEnum
from itertools import product
from typing import NamedTuple

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.costs import MicroBatchCosts
from meshrl.common.hardware.zebra.schedule import ScheduledTask, TaskKind


class RankStream(IntEnum):
    """Stream that executes one operation at a time, in order."""

    ATTENTION = 0  # attention ranks compute
    EXPERTS = 1  # expert ranks compute
    DISPATCH = 2  # from attention ranks to experts
    COMBINE = 3  # from experts to attention ranks


class Operation(NamedTuple):
    """Task on a stream.

    Dependencies are numbers: 0 is the beginning of the step, n the n-th operation of the plan.
    """

    stream: RankStream
    task: ScheduledTask
    cost: int  # see `cost_index`
    first_dependency: int
    second_dependency: int


def plan_operations(
    layers: int, attention: Sequence[ScheduledTask], experts: Sequence[ScheduledTask]
) -> list[Operation]:
    """Return all operations of a step for these orders of attention and expert tasks.

    Each operation follows its dependencies and the operations before it on its stream. ConfigError
    if tasks wait for each other.
    """
    # one for each piece that sends rows or gradients to experts: backward to those below it
    sent = [
        ScheduledTask(task.backward, task.layer - task.backward, task.micro_batch, TaskKind.EXPERTS)
        for task in attention
        if task.kind is TaskKind.ATTENTION and task.layer != (0 if task.backward else layers)
    ]
    queues = {  # a transfer follows the task that produces its data
        RankStream.ATTENTION: deque(attention),
        RankStream.EXPERTS: deque(experts),
        RankStream.DISPATCH: deque(sent),
        RankStream.COMBINE: deque(experts),
    }
    hosted = frozenset(task for task in attention if task.kind is TaskKind.HOSTED)
    numbers: dict[tuple[RankStream, ScheduledTask], int] = {}
    operations: list[Operation] = []
    while any(queues.values()):
        before = len(operations)
        for stream, queue in queues.items():
            while queue:
                needs = [
                    numbers.get(one, -1)
                    for one in _find_dependencies(stream, queue[0], layers, hosted)
                ]
                if -1 in needs:
                    break
                task = queue.popleft()
                first, second, *_ = (*needs, 0, 0)
                cost = cost_index(stream, task, layers)
                operations.append(Operation(stream, task, cost, first, second))
                numbers[stream, task] = len(operations)
        if len(operations) == before:
            waiting = next(queue[0] for queue in queues.values() if queue)
            raise ConfigError(
                f"{waiting} never starts", where="an order of tasks", fix="Order them by layer"
            )
    return operations


def simulate_plan_s(layers: int, plan: Sequence[Operation], costs: MicroBatchCosts) -> float:
    """Return the seconds of a step in the order of a plan."""
    seconds: list[float] = []  # of each task, at its `cost_index`
    for work, backward in product(TaskKind, (False, True)):
        seconds += [
            costs.get_task_s(ScheduledTask(backward, layer, 0, work)) for layer in range(layers)
        ]
        seconds.append(costs.get_head_s(backward) if work is TaskKind.ATTENTION else 0.0)
    seconds += costs.dispatch_s, costs.combine_s
    ends = [0.0]
    free = [0.0, 0.0, 0.0, 0.0]
    for stream, _, cost, first, second in plan:
        free[stream] = max(free[stream], ends[first], ends[second]) + seconds[cost]
        ends.append(free[stream])
    return max(ends)


def cost_index(stream: RankStream, task: ScheduledTask, layers: int) -> int:
    """Return the index of a task's seconds in the list of costs.

    The list has pieces, experts and hosted experts by `TaskKind`, each first forward and then
    backward by layer, then one dispatch and one combine.
    """
    if stream >= RankStream.DISPATCH:
        return len(TaskKind) * 2 * (layers + 1) + stream - RankStream.DISPATCH
    return (task.kind * 2 + task.backward) * (layers + 1) + task.layer


def _find_dependencies(
    stream: RankStream, task: ScheduledTask, layers: int, hosted: Collection[ScheduledTask]
) -> list[tuple[RankStream, ScheduledTask]]:
    backward, layer, micro, work = task
    if stream is RankStream.COMBINE:
        beside = task._replace(kind=TaskKind.HOSTED)
        dependencies = [(RankStream.EXPERTS, task)]
        return [*dependencies, (RankStream.ATTENTION, beside)] if beside in hosted else dependencies
    if stream is RankStream.DISPATCH:
        return [(RankStream.ATTENTION, ScheduledTask(backward, layer + backward, micro))]
    if work is not TaskKind.ATTENTION:
        return [(RankStream.DISPATCH, task._replace(kind=TaskKind.EXPERTS))]
    if backward and layer == layers:
        return [(RankStream.ATTENTION, ScheduledTask(False, layer, micro))]
    if layer or backward:
        return [
            (
                RankStream.COMBINE,
                ScheduledTask(backward, layer - (not backward), micro, TaskKind.EXPERTS),
            )
        ]
    return []
