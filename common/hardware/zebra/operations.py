"""In which order a step's tasks and transfers run, whatever they cost: the plan of a schedule.

Attention ranks and expert ranks have a compute stream each. Transfers towards experts have the
dispatch stream, those back from them the combine stream, forward and backward alike. A combine is a
collective of all ranks, so that it waits for experts that attention ranks host as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from common.base.errors import ConfigError
from common.hardware.zebra.schedule import Task, TaskKind, attention_order, expert_order


class RankStream(IntEnum):
    """What does one thing at a time, in the order it was given."""

    ATTENTION = 0  # attention ranks compute
    EXPERTS = 1  # expert ranks compute
    DISPATCH = 2  # from attention ranks to experts
    COMBINE = 3  # from experts to attention ranks


class Operation(NamedTuple):
    """A task on a stream. What it needs is told by numbers: 0 is the beginning of the step, n the
    n-th operation of the plan.
    """

    stream: RankStream
    cost: int  # see `cost_index`
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """All tasks of a step, each after what it needs and after those before it on its stream."""

    layers: int
    operations: tuple[Operation, ...]
    tasks: tuple[Task, ...]


@lru_cache(maxsize=256)
def planned(layers: int, micros: int, hosted: tuple[bool, ...]) -> TaskPlan:
    """The order of `schedule.py`."""
    attention = attention_order(layers, micros, hosted)
    return planned_as(layers, attention, expert_order(layers, micros))


def planned_as(layers: int, attention: Sequence[Task], experts: Sequence[Task]) -> TaskPlan:
    """Any other order of what both compute. ConfigError when its tasks wait for each other."""
    queues = _queues(layers, attention, experts)
    hosted = frozenset(task for task in attention if task.work is TaskKind.HOSTED)
    numbers: dict[tuple[RankStream, Task], int] = {}
    operations: list[Operation] = []
    while any(queues.values()):
        before = len(operations)
        for stream, queue in queues.items():
            while queue:
                needs = [numbers.get(one, -1) for one in _needs(stream, queue[0], layers, hosted)]
                if -1 in needs:
                    break
                task = queue.popleft()
                first, second, *_ = (*needs, 0, 0)
                operations.append(
                    Operation(stream, cost_index(stream, task, layers), first, second)
                )
                numbers[stream, task] = len(operations)
        if len(operations) == before:
            waiting = next(queue[0] for queue in queues.values() if queue)
            raise ConfigError(
                f"{waiting} never starts", where="an order of tasks", fix="order them by layer"
            )
    return TaskPlan(layers, tuple(operations), tuple(task for _, task in numbers))


def cost_index(stream: RankStream, task: Task, layers: int) -> int:
    """Where a list has the seconds of a task: pieces, hosted experts and experts, of each first
    forward and then backward by layer; after them a dispatch, and a combine.
    """
    if stream >= RankStream.DISPATCH:
        return len(TaskKind) * 2 * (layers + 1) + stream - RankStream.DISPATCH
    return (task.work * 2 + task.backward) * (layers + 1) + task.layer


def _queues(
    layers: int, attention: Sequence[Task], experts: Sequence[Task]
) -> dict[RankStream, deque[Task]]:
    """What is on each stream: a transfer follows what makes it."""
    sent = [_dispatched(task) for task in attention if _sends(task, layers)]
    return {
        RankStream.ATTENTION: deque(attention),
        RankStream.EXPERTS: deque(experts),
        RankStream.DISPATCH: deque(sent),
        RankStream.COMBINE: deque(experts),
    }


def _sends(task: Task, layers: int) -> bool:
    """Whether a piece sends rows, or gradients, to experts."""
    end = 0 if task.backward else layers
    return task.work is TaskKind.ATTENTION and task.layer != end


def _dispatched(task: Task) -> Task:
    """The experts that a piece sends to: backward those below it."""
    return Task(task.backward, task.layer - task.backward, task.micro, TaskKind.EXPERTS)


def _needs(
    stream: RankStream, task: Task, layers: int, hosted: Collection[Task]
) -> list[tuple[RankStream, Task]]:
    """What has to have ended before a task starts."""
    backward, layer, micro, work = task
    if stream is RankStream.COMBINE:
        beside = task._replace(work=TaskKind.HOSTED)
        made = [(RankStream.EXPERTS, task)]
        return [*made, (RankStream.ATTENTION, beside)] if beside in hosted else made
    if stream is RankStream.DISPATCH:
        return [(RankStream.ATTENTION, Task(backward, layer + backward, micro))]
    if work is not TaskKind.ATTENTION:
        return [(RankStream.DISPATCH, task._replace(work=TaskKind.EXPERTS))]
    if backward and layer == layers:
        return [(RankStream.ATTENTION, Task(False, layer, micro))]
    if layer or backward:
        return [
            (RankStream.COMBINE, Task(backward, layer - (not backward), micro, TaskKind.EXPERTS))
        ]
    return []
