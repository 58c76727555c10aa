"""What a job's step asks for, how fast it is done, and who does it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshrl.common.state.pool.demand.measurements import DecodeCurve


@dataclass(frozen=True, slots=True)
class StepTerms:
    """What a job's file says of a step."""

    groups_per_step: int  # of a step
    group_size: int
    max_staleness: int
    engine_slots: int  # of an engine
    bin_tokens: int  # of a bin, which one worker computes; 0: gradients are divided at will


@dataclass(frozen=True, slots=True)
class StepDemand:
    """What a step asks for, whoever does it."""

    trajectories: float  # of a step
    sampled: float  # tokens of a trajectory
    tool_s: float  # of a trajectory
    trained: float  # tokens of a step
    shape: tuple[float, ...] = ()  # tokens of a trajectory at each of `LEVELS`; empty: not known


@dataclass(frozen=True, slots=True)
class StepRates:
    """How fast it is done, as measured with one split."""

    curve: DecodeCurve  # of its engines
    friction: float  # seconds of a trajectory's token over those by the curve
    work_s: float  # gradients of a step's tokens, by one worker
    fixed_s: float  # of a step, whoever computes
    cores: float  # share of the host's cores that were busy; 0: not known


@dataclass(frozen=True, slots=True)
class WorkerSplit:
    """Who does what: engines, and workers that train, each rank of the core among them.

    Where engines may be of several workers, `degrees` say of how many each is, and `engines` are
    how many there were when rates were measured: what others bring is in `speed`, as they change
    what a token takes, and in `width`, as they are as good as more or fewer of those.
    """

    engines: int
    trainers: int
    degrees: tuple[int, ...] = ()  # falling; empty: one worker each
    speed: float = 1.0  # at which it rolls out, over that of the split that rates are of
    width: float = 1.0  # of its engines beside each other, over that

    def is_same(self, other: WorkerSplit | None) -> bool:
        """Whether the same workers do the same, whatever they were compared with."""
        if other is None or (self.trainers, self.degrees) != (other.trainers, other.degrees):
            return False
        return bool(self.degrees) or self.engines == other.engines

    @property
    def description(self) -> str:
        """Its engines, for people."""
        return f"rollout of {','.join(map(str, self.degrees))}"


def compute_gradient_share(trainers: int, tokens: float, terms: StepTerms) -> float:
    """The share of a step's gradients that the busiest of its workers computes: whole bins."""
    bins = math.ceil(tokens / terms.bin_tokens) if terms.bin_tokens else 0
    return math.ceil(bins / trainers) / bins if bins else 1 / trainers
