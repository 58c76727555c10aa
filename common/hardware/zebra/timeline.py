"""How long a step takes: a list schedule over streams that keep their order.

A task starts when what it needs is there and its stream has ended the one before:
A_F(i, j) >= C_F(i - 1, j) + T_C (HeterMoE, arXiv 2504.03871). Ranks compute while transfers go on,
and dispatches go on beside combines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.costs import FIX, Costs
from meshrl.common.hardware.zebra.schedule import Task, TaskKind


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step of one group."""

    makespan: float
    attention_busy: float  # seconds that attention ranks compute
    experts_busy: float
    transfers: float  # seconds of all transfers
    hidden: float  # share of them that makes the step no longer; 1 where nothing is sent

    @property
    def attention_utilisation(self) -> float:
        """Share of the step in which attention ranks compute."""
        return self.attention_busy / self.makespan if self.makespan else 0.0

    @property
    def experts_utilisation(self) -> float:
        """Share of the step in which expert ranks compute."""
        return self.experts_busy / self.makespan if self.makespan else 0.0


def timeline(layers: int, micros: int, costs: Costs) -> Timeline:
    """The step in the order of `schedule.py`."""

    def computed_s(work: TaskKind) -> float:
        passes = product((False, True), range(layers))
        return micros * sum(costs.of(Task(back, layer, 0, work)) for back, layer in passes)

    step_s = makespan(layers, micros, costs)
    attention = computed_s(TaskKind.ATTENTION) + computed_s(TaskKind.HOSTED)
    attention += micros * (costs.head_of(False) + costs.head_of(True))
    transfers = 2 * layers * micros * (costs.dispatch + costs.combine)
    exposed = step_s - makespan(layers, micros, replace(costs, dispatch=0.0, combine=0.0))
    hidden = min(1.0, max(0.0, 1 - exposed / transfers)) if transfers else 1.0
    return Timeline(step_s, attention, computed_s(TaskKind.EXPERTS), transfers, hidden)


def makespan(layers: int, micros: int, costs: Costs) -> float:
    """Seconds of the step in the order of `schedule.py`."""
    _check(layers, costs)
    front = _Front(micros, costs)
    for layer in range(layers):
        front.pieces(costs.of(Task(False, layer, 0)))
        front.experts(False, layer)
    front.pieces(costs.head_of(False) + costs.head_of(True))
    for layer in reversed(range(layers)):
        front.experts(True, layer)
        front.pieces(costs.of(Task(True, layer, 0)))
    return front.attention  # the last to end


def serial_s(layers: int, micros: int, costs: Costs) -> float:
    """Seconds of the step when micro-batches go through one by one and nothing overlaps: DistEP,
    the source's disaggregated baseline. Where some experts of a layer are hosted, both kinds of
    ranks compute at once.
    """
    total = costs.head_of(False) + costs.head_of(True)
    for backward, layer in product((False, True), range(layers)):
        total += costs.of(Task(backward, layer, 0)) + costs.dispatch + costs.combine
        total += max(
            costs.of(Task(backward, layer, 0, work)) for work in (TaskKind.EXPERTS, TaskKind.HOSTED)
        )
    return micros * total


class _Front:
    """How far a step has come on each stream, layer by layer."""

    def __init__(self, micros: int, costs: Costs) -> None:
        self._micros, self._costs = range(micros), costs
        self._dispatched, self._combined = [0.0] * micros, [0.0] * micros
        self._experts = self._dispatch = self._combine = 0.0
        self.attention = 0.0

    def pieces(self, seconds: float) -> None:
        """A piece of all micro-batches, and what it sends."""
        for micro in self._micros:
            self.attention = max(self.attention, self._combined[micro]) + seconds
            self._dispatch = max(self._dispatch, self.attention) + self._costs.dispatch
            self._dispatched[micro] = self._dispatch

    def experts(self, backward: bool, layer: int) -> None:
        """The experts of a layer for all micro-batches, wherever they lie."""
        hosted = self._costs.of(Task(backward, layer, 0, TaskKind.HOSTED))
        kept = self._costs.of(Task(backward, layer, 0, TaskKind.EXPERTS))
        made = [0.0] * len(self._micros)
        for micro in self._micros if hosted else ():
            self.attention = max(self.attention, self._dispatched[micro]) + hosted
            made[micro] = self.attention
        for micro in self._micros:
            self._experts = max(self._experts, self._dispatched[micro]) + kept
            self._combine = max(self._combine, self._experts, made[micro]) + self._costs.combine
            self._combined[micro] = self._combine


def _check(layers: int, costs: Costs) -> None:
    for name, by_layer in (("hosted", costs.hosted), ("kept", costs.kept)):
        if len(by_layer) not in (0, layers):
            raise ConfigError(
                f"{name} has {len(by_layer)} of {layers} layers", where="costs of zebra", fix=FIX
            )
