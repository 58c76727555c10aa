"""Speeds of generating gangs: by the planner's cost model, or by a job's emulated speed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from meshrl.common.job.emulation import EmulatedEngineSpeed
from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.services.planner.costs.rollout_costs import EngineGang

MIN_STEP_S = 1e-9  # of a decode step


class SimSpeed(Protocol):
    """Speed of one gang."""

    def predict_step_s(self, batch_size: float, context_tokens: float) -> float:
        """Predict the seconds of a decode step of `batch_size` sequences with `context_tokens`
        tokens of context each.
        """
        ...

    def predict_prefill_s(self, tokens: float, prefix_tokens: float = 0.0) -> float:
        """Predict the seconds of a forward pass of `tokens` tokens after `prefix_tokens` others."""
        ...

    def get_capacity_tokens(self) -> float:
        """Return the KV capacity in tokens."""
        ...

    @property
    def plateau_batch(self) -> int:
        """Number of sequences from which more hardly increase tokens per second; 0: not known."""
        ...

    def make_curve(self, steps: int) -> DecodeCurve:
        """Make the curve that its engine measures in `steps` decode steps."""
        ...


@dataclass(frozen=True, slots=True)
class EmulatedSpeed:
    """Emulated speed of engines."""

    emulated_speed: EmulatedEngineSpeed
    kind: str
    tensor_parallel_size: int

    def predict_step_s(self, batch_size: float, context_tokens: float) -> float:
        return (
            self.emulated_speed.decode_step_s
            * max(1.0, batch_size / self.emulated_speed.plateau_batch)
            + self.emulated_speed.collectives_s
        )

    def predict_prefill_s(self, tokens: float, prefix_tokens: float = 0.0) -> float:
        return tokens / self.emulated_speed.prefill_tokens_per_s

    def get_capacity_tokens(self) -> float:
        return math.inf

    @property
    def plateau_batch(self) -> int:
        return self.emulated_speed.plateau_batch

    def make_curve(self, steps: int) -> DecodeCurve:
        pace = self.emulated_speed
        return DecodeCurve(
            self.kind,
            self.tensor_parallel_size,
            pace.decode_step_s + pace.collectives_s,
            prefill_tokens_per_s=pace.prefill_tokens_per_s,
            fitted_steps=steps,
            max_tokens_per_s=pace.plateau_batch / pace.decode_step_s,
        )


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Speed of engines by a measured curve."""

    measured_curve: DecodeCurve

    def predict_step_s(self, batch_size: float, context_tokens: float) -> float:
        return max(self.measured_curve.predict_step_s(batch_size, context_tokens), MIN_STEP_S)

    def predict_prefill_s(self, tokens: float, prefix_tokens: float = 0.0) -> float:
        """Predict the seconds of a prefill, independent of the prefix; 0 without a known rate."""
        rate = self.measured_curve.prefill_tokens_per_s
        return tokens / rate if rate else 0.0

    def get_capacity_tokens(self) -> float:
        """Return infinity, as the KV capacity is not measured."""
        return math.inf

    @property
    def plateau_batch(self) -> int:
        """Batch size at which all sequences take as long as the rest of a step."""
        curve = self.measured_curve
        return max(1, round(curve.base_s / curve.sequence_s)) if curve.sequence_s else 0

    def make_curve(self, steps: int) -> DecodeCurve:
        return replace(self.measured_curve, fitted_steps=steps)


@dataclass(frozen=True)
class ModelSpeed:
    """Speed of a model on accelerators (`services/planner/costs/rollout_costs.py`)."""

    gang: EngineGang

    def predict_step_s(self, batch_size: float, context_tokens: float) -> float:
        return self.gang.predict_decode_step_s(batch_size, context_tokens)

    def predict_prefill_s(self, tokens: float, prefix_tokens: float = 0.0) -> float:
        return self.gang.predict_prefill_s(tokens, prefix_tokens)

    def get_capacity_tokens(self) -> float:
        return self.gang.compute_kv_capacity()

    @property
    def plateau_batch(self) -> int:
        """Batch size at which a step's arithmetic takes longer than reading its weights."""
        return max(1, round(self.gang.predict_decode_step_s(1, 0) / self.gang.token_compute_s))

    def make_curve(self, steps: int) -> DecodeCurve:
        return replace(self._curve, fitted_steps=steps)

    @cached_property
    def _curve(self) -> DecodeCurve:
        return self.gang.predict_curve()
