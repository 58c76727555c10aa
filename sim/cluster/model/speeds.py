"""How fast gangs generate: by the planner's cost model, or by the pace that a job declares."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from meshrl.common.job.pace import Pace
from meshrl.common.state.pool.demand.measured import Curve
from meshrl.services.planner.costs.rollout import EngineGang

LEAST_S = 1e-9  # of a decode step


class SimSpeed(Protocol):
    """How fast one gang is."""

    def step_s(self, batch: float, context: float) -> float:
        """Seconds of a decode step of `batch` sequences with so many tokens of context each."""
        ...

    def prefill_s(self, tokens: float, before: float = 0.0) -> float:
        """Seconds of the forward pass of so many tokens behind `before` others."""
        ...

    def capacity(self) -> float:
        """Tokens whose keys and values fit."""
        ...

    @property
    def plateau(self) -> int:
        """Sequences from which more bring hardly more tokens a second; 0: not known."""
        ...

    def curve(self, steps: int) -> Curve:
        """What its engine has measured of itself in so many decode steps."""
        ...


@dataclass(frozen=True, slots=True)
class PacedSpeed:
    """Of engines that imitate a pace."""

    pace: Pace
    kind: str
    degree: int

    def step_s(self, batch: float, context: float) -> float:
        return self.pace.decode_s * max(1.0, batch / self.pace.plateau) + self.pace.collectives_s

    def prefill_s(self, tokens: float, before: float = 0.0) -> float:
        return tokens / self.pace.prefill_tokens_per_s

    def capacity(self) -> float:
        return math.inf

    @property
    def plateau(self) -> int:
        return self.pace.plateau

    def curve(self, steps: int) -> Curve:
        pace = self.pace
        return Curve(
            self.kind,
            self.degree,
            pace.decode_s + pace.collectives_s,
            prefill_tokens_per_s=pace.prefill_tokens_per_s,
            steps=steps,
            most_tokens_per_s=pace.plateau / pace.decode_s,
        )


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Of engines by a curve."""

    measured: Curve

    def step_s(self, batch: float, context: float) -> float:
        return max(self.measured.step_s(batch, context), LEAST_S)

    def prefill_s(self, tokens: float, before: float = 0.0) -> float:
        """Whatever is before; nothing where no rate is known."""
        rate = self.measured.prefill_tokens_per_s
        return tokens / rate if rate else 0.0

    def capacity(self) -> float:
        """Nobody measured how many tokens are too many."""
        return math.inf

    @property
    def plateau(self) -> int:
        """Where all sequences together take as long as the rest of a step."""
        curve = self.measured
        return max(1, round(curve.base_s / curve.sequence_s)) if curve.sequence_s else 0

    def curve(self, steps: int) -> Curve:
        return replace(self.measured, steps=steps)


@dataclass(frozen=True)
class ModelSpeed:
    """Of a model on accelerators (`services/planner/costs/rollout.py`)."""

    gang: EngineGang

    def step_s(self, batch: float, context: float) -> float:
        return self.gang.step_s(batch, context)

    def prefill_s(self, tokens: float, before: float = 0.0) -> float:
        return self.gang.prefill_s(tokens, before)

    def capacity(self) -> float:
        return self.gang.capacity()

    @property
    def plateau(self) -> int:
        """Where a step's arithmetic takes longer than the reading of its weights."""
        return max(1, round(self.gang.step_s(1, 0) / self.gang.busy_s))

    def curve(self, steps: int) -> Curve:
        return replace(self._curve, steps=steps)

    @cached_property
    def _curve(self) -> Curve:
        return self.gang.curve()
