"""Order of a step's tasks on attention ranks and on expert ranks (HeterMoE, Theorem 1).

For attention ranks a model of `layers` MoE layers is `layers` + 1 pieces. Piece 0 embeds, attends
and routes. Piece i combines the outputs of the experts of layer i - 1, attends and routes. The last
piece combines, and computes head and loss. The source lets forward and backward alternate in its
last attention layer; here that is the last piece, as the last layer has experts too.

The output of a task is sent as soon as the task has run, so transfers have the order of the tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class TaskKind(IntEnum):
    """Kind of a task's computation."""

    ATTENTION = 0  # a piece, on attention ranks
    HOSTED = 1  # experts on attention ranks (Asym-EA)
    EXPERTS = 2  # experts on expert ranks


class LaneKind(IntEnum):
    """Direction of an exchange between attention ranks and the experts' ranks."""

    DISPATCH = 0  # to the experts
    COMBINE = 1  # back


class ScheduledExchange(NamedTuple):
    """Exchange of a micro-batch's rows of an MoE layer."""

    lane: LaneKind
    backward: bool
    layer: int
    micro_batch: int


class ScheduledTask(NamedTuple):
    """Pass of a micro-batch through a piece, or through experts of a layer."""

    backward: bool
    layer: int  # for `TaskKind.ATTENTION`, the piece
    micro_batch: int
    kind: TaskKind = TaskKind.ATTENTION


def order_attention_tasks(
    layers: int, micro_batches: int, hosted: Sequence[bool] = ()
) -> list[ScheduledTask]:
    """Return the tasks of an attention rank in a step, in order.

    `hosted` lists for each layer if its experts are hosted there. These run after the piece of all
    micro-batches, and backward before it.
    """
    order: list[ScheduledTask] = []
    for layer in range(layers):
        order += _all_micro_batches(False, layer, micro_batches)
        if _is_hosted(hosted, layer):
            order += _all_micro_batches(False, layer, micro_batches, TaskKind.HOSTED)
    for micro in range(micro_batches):
        order += (ScheduledTask(False, layers, micro), ScheduledTask(True, layers, micro))
    for layer in reversed(range(layers)):
        if _is_hosted(hosted, layer):
            order += _all_micro_batches(True, layer, micro_batches, TaskKind.HOSTED)
        order += _all_micro_batches(True, layer, micro_batches)
    return order


def order_expert_tasks(layers: int, micro_batches: int) -> list[ScheduledTask]:
    """Return the tasks of an expert rank in a step, in order."""
    order: list[ScheduledTask] = []
    for layer in range(layers):
        order += _all_micro_batches(False, layer, micro_batches, TaskKind.EXPERTS)
    for layer in reversed(range(layers)):
        order += _all_micro_batches(True, layer, micro_batches, TaskKind.EXPERTS)
    return order


def order_exchanges(
    layers: int, micro_batches: int, hosted: Sequence[bool] = ()
) -> list[ScheduledExchange]:
    """Return the exchanges of a step in the order in which every rank launches its own.

    Operations of two NCCL communicators on one device must be launched in the same order on all
    ranks: a kernel that waits for its peer may keep another one from starting. No exchange here
    depends on a later one, so a step ends even if they run one after the other. A combine follows
    the dispatch of half as many later tasks as there are micro-batches. Both lanes are then ahead
    of the tasks that wait for their rows. Ranks that host experts compute these after the pieces of
    all micro-batches, so the combines of such a layer follow all of its dispatches.
    """
    places: list[tuple[int, ScheduledExchange]] = []
    tasks = order_expert_tasks(layers, micro_batches)
    for number, task in enumerate(tasks):
        ahead = micro_batches // 2
        if _is_hosted(hosted, task.layer):
            ahead = micro_batches - 1 - task.micro_batch
        about = task.backward, task.layer, task.micro_batch
        places += (
            (number, ScheduledExchange(LaneKind.DISPATCH, *about)),
            (min(number + ahead, len(tasks) - 1), ScheduledExchange(LaneKind.COMBINE, *about)),
        )
    # The sort is stable: combines keep the order of their tasks.
    return [exchange for _, exchange in sorted(places, key=lambda one: (one[0], one[1].lane))]


def _is_hosted(hosted: Sequence[bool], layer: int) -> bool:
    return layer < len(hosted) and hosted[layer]


def _all_micro_batches(
    backward: bool, layer: int, micro_batches: int, work: TaskKind = TaskKind.ATTENTION
) -> list[ScheduledTask]:
    return [ScheduledTask(backward, layer, micro, work) for micro in range(micro_batches)]
