"""Quantities of a job's step: its terms, demand and rates, and the split of workers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshrl.common.state.pool.demand.measurements import DecodeCurve

ENGINE_SLICE_S = 0.2  # an engine's slice, up to the end of a decode step
QUANTUM_SWITCHES = 2.0  # minimum of a slice, in switches (`services/node/slices/hrrs.py`)


@dataclass(frozen=True, slots=True)
class StepTerms:
    """Terms of a step from the job file."""

    groups_per_step: int  # per step
    group_size: int
    max_staleness: int
    engine_slots: int  # per engine
    bin_tokens: int  # per bin, computed by one worker; 0: gradients are divided freely
    core_workers: int = 1  # ranks of the core; the other training workers are hybrids
    transfer_s: float = 0.0  # seconds in which a hybrid sends its gradient of a step to the core
    switch_s: float = 0.0  # seconds of a switch between slices of an engine and of the core


@dataclass(frozen=True, slots=True)
class StepDemand:
    """Demand of a step, independent of the split."""

    trajectories: float  # per step
    sampled_tokens: float  # tokens per trajectory
    tool_s: float  # seconds per trajectory
    trained_tokens: float  # tokens per step
    length_quantiles: tuple[
        float, ...
    ] = ()  # tokens of a trajectory at each of `QUANTILES`; empty: not known


@dataclass(frozen=True, slots=True)
class StepRates:
    """Rates of a step, measured with one split."""

    curve: DecodeCurve  # of its engines
    friction: float  # seconds per token of a trajectory, relative to the curve
    gradient_s: float  # seconds of a step's gradients on one worker
    fixed_s: float  # seconds per step, independent of the number of workers
    core_share: float  # share of the host's cores that were busy; 0: not known


@dataclass(frozen=True, slots=True)
class WorkerSplit:
    """Split of workers: engines, and training workers including each rank of the core.

    If engines may have several workers, `degrees` has the number of workers of each. `engines` is
    then the number at the time of the rates. The effect of other degrees is in
    `relative_speed`, as they change the time of a token, and in `relative_width`, as they count as
    more or fewer of those engines.
    """

    engines: int
    trainers: int
    degrees: tuple[int, ...] = ()  # descending; empty: one worker each
    relative_speed: float = 1.0  # rollout speed relative to the split of the rates
    relative_width: float = 1.0  # number of engines in parallel, relative to the split of the rates
    shared_engines: int = 0  # of the engines: those that take time slices of the core's workers
    companions: int = 0  # jobs that share the core's workers

    def is_same(self, other: WorkerSplit | None) -> bool:
        """Return True if the workers and degrees are the same, whatever the reference of
        `relative_speed`.
        """
        if other is None or (self.trainers, self.degrees) != (other.trainers, other.degrees):
            return False
        sharing = self.shared_engines, self.companions
        if sharing != (other.shared_engines, other.companions):
            return False
        return bool(self.degrees) or self.engines == other.engines

    @property
    def description(self) -> str:
        """Engines of the split, for display."""
        return f"rollout of {','.join(map(str, self.degrees))}"


def predict_gradients_s(gradient_s: float, trainers: int, tokens: float, terms: StepTerms) -> float:
    """Predict the seconds of a step's gradients on `trainers` workers.

    `gradient_s` are those on one worker. The core computes while hybrids send their gradients: n
    ranks and h hybrids share the work and h transfers. Hybrids do not help if the core alone takes
    less time than a transfer.
    """
    hybrids = max(0, trainers - terms.core_workers)
    together_s = gradient_s * compute_gradient_share(trainers, tokens, terms)
    if not hybrids or not terms.transfer_s:
        return together_s
    alone_s = gradient_s * compute_gradient_share(terms.core_workers, tokens, terms)
    return min(alone_s, together_s + hybrids * terms.transfer_s / trainers)


def compute_gradient_share(trainers: int, tokens: float, terms: StepTerms) -> float:
    """Return the share of a step's gradients of the busiest worker, in whole bins."""
    bins = math.ceil(tokens / terms.bin_tokens) if terms.bin_tokens else 0
    return math.ceil(bins / trainers) / bins if bins else 1 / trainers


@dataclass(frozen=True, slots=True)
class SliceShares:
    """Shares of a shared worker's time while both its core and its engine have work."""

    core: float
    engine: float  # the rest are switches


def compute_slice_shares(gradient_s: float, tokens: float, terms: StepTerms) -> SliceShares:
    """Compute the shares of slices that alternate: one piece of the core's gradients, then an
    engine for its quantum (`services/node/slices`).
    """
    bins = math.ceil(tokens / terms.bin_tokens) if terms.bin_tokens else terms.groups_per_step
    quantum_s = QUANTUM_SWITCHES * terms.switch_s
    piece_s = max(gradient_s / max(1, bins), quantum_s, 1e-9)
    engine_s = max(ENGINE_SLICE_S, quantum_s)
    cycle_s = piece_s + engine_s + 2 * terms.switch_s
    return SliceShares(piece_s / cycle_s, engine_s / cycle_s)
