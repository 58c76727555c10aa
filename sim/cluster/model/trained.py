"""How fast a job trains: by the planner's cost model (`services/planner/costs/training.py`), or by
the pace that it declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from common.hardware.profiles import Accelerator
from common.hardware.shapes import ModelShape
from common.job.pace import TrainingPace
from kernels.packing import pack_rounds
from services.planner.costs.training import TrainingLayout, TrainingWork, step_s

MANY = 64  # micro-batches over which the filling of a pipeline is spread


@dataclass(frozen=True)
class ModelTraining:
    """A core of `layout`; a helper computes with a copy of the model on its own workers."""

    shape: ModelShape
    on: Accelerator
    layout: TrainingLayout

    def replicas(self, workers: int, core: bool) -> int:
        """The core's data parallel ones; a helper is one."""
        return self.layout.data if core else 1

    def update_s(self) -> float:
        """Exchange of gradients and update: what a step without tokens takes."""
        return self._empty_s

    def bins_s(self, tokens: Sequence[float]) -> Sequence[float]:
        """A trajectory each, as one of many in its pipeline."""
        return [self._piece_s(one) for one in tokens]

    @cached_property
    def _empty_s(self) -> float:
        return step_s(self.shape, self.on, self.layout, TrainingWork(self.layout.data, 0.0, 0.0))

    def _piece_s(self, tokens: float) -> float:
        """Seconds of one sequence on one replica, with its part of the pipeline's filling."""
        work = TrainingWork(MANY, MANY * tokens, MANY * tokens * tokens)
        return (step_s(self.shape, self.on, self._replica, work) - self._idle_s) / MANY

    @cached_property
    def _replica(self) -> TrainingLayout:
        return replace(self.layout, data=1, micro=1, sharded=False)

    @cached_property
    def _idle_s(self) -> float:
        return step_s(self.shape, self.on, self._replica, TrainingWork(1, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class PacedTraining:
    """Of trainers that imitate a pace: a worker computes whole bins, one after the other."""

    pace: TrainingPace
    bin_tokens: int

    def replicas(self, workers: int, core: bool) -> int:
        """A copy each."""
        return workers

    def update_s(self) -> float:
        """Seconds of the optimizer's step."""
        return self.pace.update_s

    def bins_s(self, tokens: Sequence[float]) -> Sequence[float]:
        """Seconds of each bin."""
        return [one / self.pace.tokens_per_s for one in packed(tokens, self.bin_tokens)]


def packed(tokens: Sequence[float], most: int) -> list[float]:
    """Tokens of each bin, as trainers pack them."""
    places = sorted(map(round, tokens), reverse=True)
    return [float(sum(places[i] for i in bin)) for (bin,) in pack_rounds(places, most)]
