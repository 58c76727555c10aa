"""Step time by a list schedule over streams that keep their order.

A task starts when its inputs are there and its stream has finished the task before: A_F(i, j) >=
C_F(i - 1, j) + T_C (HeterMoE, arXiv 2504.03871). Computation overlaps transfers, and dispatches
overlap combines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.costs import FIX, MicroBatchCosts
from meshrl.common.hardware.zebra.schedule import ScheduledTask, TaskKind


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of a step of one group."""

    makespan_s: float
    attention_busy_s: float  # seconds that attention ranks compute
    experts_busy_s: float
    transfer_s: float  # seconds of all transfers
    # share of transfers that does not lengthen the step; 1 without transfers
    hidden_transfer_share: float

    @property
    def attention_utilisation(self) -> float:
        """Share of the step in which attention ranks compute."""
        return self.attention_busy_s / self.makespan_s if self.makespan_s else 0.0

    @property
    def experts_utilisation(self) -> float:
        """Share of the step in which expert ranks compute."""
        return self.experts_busy_s / self.makespan_s if self.makespan_s else 0.0


def build_timeline(layers: int, micro_batches: int, costs: MicroBatchCosts) -> Timeline:
    """Return the timeline of a step in the order of `schedule.py`."""

    def computed_s(work: TaskKind) -> float:
        passes = product((False, True), range(layers))
        return micro_batches * sum(
            costs.get_task_s(ScheduledTask(back, layer, 0, work)) for back, layer in passes
        )

    step_s = compute_makespan_s(layers, micro_batches, costs)
    attention = computed_s(TaskKind.ATTENTION) + computed_s(TaskKind.HOSTED)
    attention += micro_batches * (costs.get_head_s(False) + costs.get_head_s(True))
    transfers = 2 * layers * micro_batches * (costs.dispatch_s + costs.combine_s)
    exposed = step_s - compute_makespan_s(
        layers, micro_batches, replace(costs, dispatch_s=0.0, combine_s=0.0)
    )
    hidden = min(1.0, max(0.0, 1 - exposed / transfers)) if transfers else 1.0
    return Timeline(step_s, attention, computed_s(TaskKind.EXPERTS), transfers, hidden)


def compute_makespan_s(layers: int, micro_batches: int, costs: MicroBatchCosts) -> float:
    """Return the seconds of the step in the order of `schedule.py`."""
    _check_layers(layers, costs)
    front = _StepProgress(micro_batches, costs)
    for layer in range(layers):
        front.run_pieces(costs.get_task_s(ScheduledTask(False, layer, 0)))
        front.run_experts(False, layer)
    front.run_pieces(costs.get_head_s(False) + costs.get_head_s(True))
    for layer in reversed(range(layers)):
        front.run_experts(True, layer)
        front.run_pieces(costs.get_task_s(ScheduledTask(True, layer, 0)))
    return front.attention_end_s  # the last to end


def compute_serial_s(layers: int, micro_batches: int, costs: MicroBatchCosts) -> float:
    """Return the seconds of the step without overlap, one micro-batch after the other.

    This is DistEP, the source's disaggregated baseline. If some experts of a layer are hosted, both
    kinds of ranks compute at the same time.
    """
    total = costs.get_head_s(False) + costs.get_head_s(True)
    for backward, layer in product((False, True), range(layers)):
        total += (
            costs.get_task_s(ScheduledTask(backward, layer, 0)) + costs.dispatch_s + costs.combine_s
        )
        total += max(
            costs.get_task_s(ScheduledTask(backward, layer, 0, work))
            for work in (TaskKind.EXPERTS, TaskKind.HOSTED)
        )
    return micro_batches * total


class _StepProgress:
    """Progress of a step on each stream, layer by layer."""

    def __init__(self, micro_batches: int, costs: MicroBatchCosts) -> None:
        self._micro_batches, self._costs = range(micro_batches), costs
        self._dispatched, self._combined = [0.0] * micro_batches, [0.0] * micro_batches
        self._experts = self._dispatch = self._combine = 0.0
        self.attention_end_s = 0.0

    def run_pieces(self, seconds: float) -> None:
        """Advance by a piece of all micro-batches, and its transfers."""
        for micro in self._micro_batches:
            self.attention_end_s = max(self.attention_end_s, self._combined[micro]) + seconds
            self._dispatch = max(self._dispatch, self.attention_end_s) + self._costs.dispatch_s
            self._dispatched[micro] = self._dispatch

    def run_experts(self, backward: bool, layer: int) -> None:
        """Advance by the experts of a layer for all micro-batches, on both kinds of ranks."""
        hosted = self._costs.get_task_s(ScheduledTask(backward, layer, 0, TaskKind.HOSTED))
        expert_task_s = self._costs.get_task_s(ScheduledTask(backward, layer, 0, TaskKind.EXPERTS))
        hosted_ends = [0.0] * len(self._micro_batches)
        for micro in self._micro_batches if hosted else ():
            self.attention_end_s = max(self.attention_end_s, self._dispatched[micro]) + hosted
            hosted_ends[micro] = self.attention_end_s
        for micro in self._micro_batches:
            self._experts = max(self._experts, self._dispatched[micro]) + expert_task_s
            self._combine = (
                max(self._combine, self._experts, hosted_ends[micro]) + self._costs.combine_s
            )
            self._combined[micro] = self._combine


def _check_layers(layers: int, costs: MicroBatchCosts) -> None:
    for name, by_layer in (("hosted", costs.hosted_s), ("kept", costs.expert_rank_shares)):
        if len(by_layer) not in (0, layers):
            raise ConfigError(
                f"{name} has {len(by_layer)} of {layers} layers", where="costs of zebra", fix=FIX
            )
