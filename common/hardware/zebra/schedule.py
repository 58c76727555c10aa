"""Which task of a step follows which on attention ranks and on expert ranks (HeterMoE, Theorem 1).

A model of `layers` mixtures is `layers` + 1 pieces to attention ranks. Piece 0 embeds, attends and
routes; piece i combines what experts of layer i - 1 made, attends and routes; the last piece
combines, and goes on to the loss. The source lets forward and backward alternate in its last
attention layer; here that is the last piece, as the last layer has experts too.

What a task makes is sent as soon as it has run, so that transfers have the order of the tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class TaskKind(IntEnum):
    """What a task computes."""

    ATTENTION = 0  # a piece, on attention ranks
    HOSTED = 1  # experts that lie on attention ranks (Asym-EA)
    EXPERTS = 2  # experts on expert ranks


class ScheduledTask(NamedTuple):
    """A micro-batch's way through a piece, or through experts of a layer."""

    backward: bool
    layer: int  # of `TaskKind.ATTENTION`, the piece
    micro_batch: int
    kind: TaskKind = TaskKind.ATTENTION


def order_attention_tasks(
    layers: int, micro_batches: int, hosted: Sequence[bool] = ()
) -> list[ScheduledTask]:
    """What an attention rank computes in a step. `hosted`: for each layer, whether experts of it
    lie there; they run after the piece of all micro-batches, and backward before it.
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
    """What an expert rank computes in a step."""
    order: list[ScheduledTask] = []
    for layer in range(layers):
        order += _all_micro_batches(False, layer, micro_batches, TaskKind.EXPERTS)
    for layer in reversed(range(layers)):
        order += _all_micro_batches(True, layer, micro_batches, TaskKind.EXPERTS)
    return order


def _is_hosted(hosted: Sequence[bool], layer: int) -> bool:
    return layer < len(hosted) and hosted[layer]


def _all_micro_batches(
    backward: bool, layer: int, micro_batches: int, work: TaskKind = TaskKind.ATTENTION
) -> list[ScheduledTask]:
    return [ScheduledTask(backward, layer, micro, work) for micro in range(micro_batches)]
