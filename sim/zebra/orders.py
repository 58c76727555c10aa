"""Whether any other order of tasks makes a step shorter than that of Theorem 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.random import Random
from meshrl.common.hardware.zebra.costs import Costs
from meshrl.common.hardware.zebra.operations import plan_s, planned_as
from meshrl.common.hardware.zebra.schedule import Task, attention_order, expert_order
from meshrl.common.hardware.zebra.timeline import makespan


def all_orders(tasks: Sequence[Task], micros: int) -> Iterator[tuple[Task, ...]]:
    """Every order in which each micro-batch keeps its own."""
    queues = [[task for task in tasks if task.micro == micro] for micro in range(micros)]

    def merged(at: tuple[int, ...]) -> Iterator[tuple[Task, ...]]:
        ended = True
        for micro, queue in enumerate(queues):
            if at[micro] < len(queue):
                ended = False
                after = (*at[:micro], at[micro] + 1, *at[micro + 1 :])
                for rest in merged(after):
                    yield (queue[at[micro]], *rest)
        if ended:
            yield ()

    return merged((0,) * micros)


def best_of_all(layers: int, micros: int, many: Sequence[Costs]) -> list[float]:
    """For each of some costs, the shortest step of any order on attention ranks and any on expert
    ranks. Micro-batches are alike: the first piece runs in order of their numbers.
    """
    best = [float("inf")] * len(many)
    first = [task for task in attention_order(layers, micros) if not (task.layer or task.backward)]
    attention = [
        order
        for order in all_orders(attention_order(layers, micros), micros)
        if [task for task in order if task in first] == first
    ]
    experts = list(all_orders(expert_order(layers, micros), micros))
    for pair in product(attention, experts):
        for i, step_s in enumerate(_steps(layers, pair, many)):
            best[i] = min(best[i], step_s)
    return best


def best_of_swaps(layers: int, micros: int, costs: Costs, swaps: int, seed: int) -> float:
    """The shortest step that is found by so many swaps of neighbours, in turn on attention and on
    expert ranks, of which those are kept that make it no longer.
    """
    random = Random(seed)
    orders = [attention_order(layers, micros), expert_order(layers, micros)]
    best = makespan(layers, micros, costs)
    for swap in range(swaps):
        order = orders[swap % 2]
        at = random.randrange(len(order) - 1)
        if order[at].micro == order[at + 1].micro:
            continue
        order[at], order[at + 1] = order[at + 1], order[at]
        step_s = next(iter(_steps(layers, orders, [costs])), float("inf"))
        if step_s > best:
            order[at], order[at + 1] = order[at + 1], order[at]
        best = min(best, step_s)
    return best


def _steps(layers: int, orders: Sequence[Sequence[Task]], many: Sequence[Costs]) -> list[float]:
    """Seconds by each of the costs; none where tasks wait for each other."""
    try:
        plan = planned_as(layers, *orders)
    except ConfigError:
        return []
    return [plan_s(layers, plan, costs) for costs in many]
