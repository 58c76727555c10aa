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


class Task(NamedTuple):
    """A micro-batch's way through a piece, or through experts of a layer."""

    backward: bool
    layer: int  # of `TaskKind.ATTENTION`, the piece
    micro: int
    work: TaskKind = TaskKind.ATTENTION


def attention_order(layers: int, micros: int, hosted: Sequence[bool] = ()) -> list[Task]:
    """What an attention rank computes in a step. `hosted`: for each layer, whether experts of it
    lie there; they run after the piece of all micro-batches, and backward before it.
    """
    order: list[Task] = []
    for layer in range(layers):
        order += _all(False, layer, micros)
        if _hosts(hosted, layer):
            order += _all(False, layer, micros, TaskKind.HOSTED)
    for micro in range(micros):
        order += (Task(False, layers, micro), Task(True, layers, micro))
    for layer in reversed(range(layers)):
        if _hosts(hosted, layer):
            order += _all(True, layer, micros, TaskKind.HOSTED)
        order += _all(True, layer, micros)
    return order


def expert_order(layers: int, micros: int) -> list[Task]:
    """What an expert rank computes in a step."""
    order: list[Task] = []
    for layer in range(layers):
        order += _all(False, layer, micros, TaskKind.EXPERTS)
    for layer in reversed(range(layers)):
        order += _all(True, layer, micros, TaskKind.EXPERTS)
    return order


def _hosts(hosted: Sequence[bool], layer: int) -> bool:
    return layer < len(hosted) and hosted[layer]


def _all(
    backward: bool, layer: int, micros: int, work: TaskKind = TaskKind.ATTENTION
) -> list[Task]:
    return [Task(backward, layer, micro, work) for micro in range(micros)]
