"""Division of rollout between the engines of a training gang and engines elsewhere.

The engines on a core's workers generate for the first `seed_s` of a step, then hand their requests
over to engines elsewhere and leave the accelerators to the core (RLBoost, arXiv 2510.19225,
Algorithm 1). `remote` counts engines elsewhere. All functions are pure; times are seconds.

The share of rollout that the core's engines do grows while the trainer is idle, and shrinks while
the other engines are. The number of engines that may vanish is bounded, because more of them could
not shorten a step: with `work_s` of rollout in a step, `training_s` of gradients, s engines on the
core's workers and n elsewhere, a balanced step takes

    training_s + max(0, (work_s - n * training_s) / (s + n)).

Without engines elsewhere it takes training_s + e * work_s / s. The efficiency e is below 1, because
fewer engines have fuller batches and wait less for the longest trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

DAMPING = 3.0  # of the changes of `seed_s` by an imbalance; the source's released code has 3
MAX_STEP_SHARE = 1.0  # longest `seed_s`, as a share of a step
BALANCED_SHARE = 0.3  # of the idle time of engines elsewhere: the trainer's in a balanced step
SETTLED_SHARE = 0.1  # largest change of a seeding time that is remembered, as a share of a step
LOWEST_REMOTE = 1  # engines that a job tries before its steps are measured
MOST_REMOTE = 4096  # where gradients take next to no time
ROUNDING = 1e-9  # of quotients
# Until it is measured. The source pays with a discount above 30 %, so an engine elsewhere does 0.7
# of the work of one more engine on the core's workers.
EFFICIENCY = 0.7
LOWEST_EFFICIENCY = 0.1


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Means of a job's latest steps, seconds, and the engines of that time."""

    trainer_idle_s: float  # the core waited for groups after its engines had stopped
    remote_idle_s: float  # the engines elsewhere had no requests
    training_s: float  # gradients
    step_s: float
    seeding: int  # engines on the core's workers
    remote: float  # mean number of engines elsewhere

    @property
    def remote_s(self) -> float:
        """Seconds of a step in which the engines elsewhere compute."""
        return max(0.0, self.step_s - self.remote_idle_s) if self.remote else 0.0


@dataclass(frozen=True, slots=True)
class EnginePrices:
    """Hourly cost of the workers that a job has anyway, and hourly price of one engine elsewhere.

    With an unknown one (0) further engines always pay.
    """

    reserved_cost: float = 0.0
    engine_price: float = 0.0


@dataclass(frozen=True, slots=True)
class OffloadState:
    """State of one job between its steps."""

    # None: no step is measured, so the engines on the core's workers generate without limit
    seed_s: float | None = None
    most_remote: int | None = None  # engines elsewhere that pay; None: no step is measured
    # by number of engines elsewhere: the last `seed_s` with that number
    known_seed_s: Mapping[str, float] = field(default_factory=dict)
    remote: int = 0  # present number
    work_s: float = 0.0  # rollout of the latest steps with engines elsewhere, in engine seconds
    efficiency: float = EFFICIENCY  # see the module
    # seconds of the latest steps with engines elsewhere beyond those of balanced engines
    overhead_s: float = 0.0
    training_s: float = 0.0  # gradients of the latest steps
    seeding: int = 0  # engines on the core's workers


def update_offload(
    state: OffloadState,
    figures: StepFigures,
    remote: int,
    prices: EnginePrices = EnginePrices(),
    *,
    remembers: bool = True,
) -> OffloadState:
    """Return the state after measured steps; `remote` engines elsewhere serve the next one.

    `remembers`: return to the last `seed_s` of this number of engines, if there was one.
    """
    if figures.step_s <= 0:
        return state
    seed_s = _compute_seed_s(state, figures)
    known = dict(state.known_seed_s)
    if abs(figures.remote - remote) < 0.5:
        is_settled = abs(seed_s - (state.seed_s or 0.0)) <= SETTLED_SHARE * figures.step_s
        if is_settled or str(remote) in known:
            known[str(remote)] = seed_s
    elif remembers:
        seed_s = known.get(str(remote)) or _scale_seed_s(
            seed_s, figures.training_s, figures.seeding, figures.remote, remote
        )
        seed_s = min(seed_s, MAX_STEP_SHARE * figures.step_s)
    work_s, efficiency = _estimate_work_s(state.seed_s, figures), state.efficiency
    overhead_s = state.overhead_s
    is_steady = abs(figures.remote - remote) < 0.5 and state.remote == remote
    if figures.remote >= 1 and state.seed_s is not None and is_steady:
        balanced_s = predict_step_s(work_s, figures.training_s, figures.seeding, figures.remote)
        overhead_s = max(0.0, figures.step_s - balanced_s)
    if not figures.remote and figures.seeding:
        if state.work_s:
            found = work_s / state.work_s
            efficiency = min(max(found, LOWEST_EFFICIENCY), 1.0)
        work_s /= efficiency
    return OffloadState(
        seed_s=seed_s,
        most_remote=choose_most_remote(work_s, efficiency, figures, prices, overhead_s),
        known_seed_s=known,
        remote=remote,
        work_s=work_s,
        efficiency=efficiency,
        overhead_s=overhead_s,
        training_s=figures.training_s,
        seeding=figures.seeding,
    )


def set_remote(state: OffloadState, remote: int) -> OffloadState:
    """Return the state of a changed number of engines elsewhere, before a step with it ends."""
    if state.seed_s is None or remote == state.remote:
        return state
    known_s = state.known_seed_s.get(str(remote))
    seed_s = (
        _scale_seed_s(state.seed_s, state.training_s, state.seeding, state.remote, remote)
        if known_s is None
        else known_s
    )
    return replace(state, seed_s=seed_s, remote=remote)


def _scale_seed_s(
    seed_s: float, training_s: float, seeding: int, before: float, remote: int
) -> float:
    """Return the seeding time that balances the same rollout with another number of engines."""
    if not before or not remote:
        return seed_s
    work_s = seed_s * (seeding + before) + before * training_s
    return max(0.0, (work_s - remote * training_s) / (seeding + remote))


def _compute_seed_s(state: OffloadState, figures: StepFigures) -> float:
    """Return `seed_s` after measured steps.

    The first value balances the step by the measured work. An imbalance then changes it by a third.
    A second of seeding removes s / n seconds from each engine elsewhere, so with few of these the
    change is smaller: it would overshoot otherwise.
    """
    seed_s = state.seed_s
    if not figures.remote:
        return figures.step_s if seed_s is None else seed_s
    if seed_s is None:
        work_s = state.efficiency * (figures.remote + figures.seeding) * figures.remote_s
        left_s = work_s - figures.remote * figures.training_s
        seed_s = left_s / (figures.seeding + figures.remote)
    else:
        damping = max(DAMPING, (figures.seeding + figures.remote) / figures.remote)
        # beyond the end of the rollout, seeding had no effect
        seed_s = min(seed_s, figures.remote_s) + _compute_imbalance_s(figures) / damping
    return min(max(seed_s, 0.0), MAX_STEP_SHARE * figures.step_s)


def _compute_imbalance_s(figures: StepFigures) -> float:
    """Return the seconds by which the trainer idles more than it should; negative: less.

    A balanced step leaves the engines elsewhere idle for longer than the trainer: no seeding time
    removes the gradients of the groups that end last, while the trainer's idle time does shrink.
    """
    trainer_s, remote_s = figures.trainer_idle_s, figures.remote_idle_s
    over_s = trainer_s - BALANCED_SHARE * remote_s
    return over_s if over_s > 0 else over_s / BALANCED_SHARE


def _estimate_work_s(seed_s: float | None, figures: StepFigures) -> float:
    """Return the rollout of the measured steps in engine seconds."""
    if not figures.remote:  # all of it on the core's workers, before the gradients
        return figures.seeding * max(0.0, figures.step_s - figures.training_s)
    seeded_s = figures.remote_s if seed_s is None else min(seed_s, figures.remote_s)
    return figures.remote_s * figures.remote + seeded_s * figures.seeding


def predict_step_s(work_s: float, training_s: float, seeding: int, remote: float) -> float:
    """Predict the seconds of a step with balanced engines; infinite without any engine."""
    if seeding + remote <= 0:
        return math.inf
    return training_s + max(0.0, (work_s - remote * training_s) / (seeding + remote))


def choose_most_remote(
    work_s: float,
    efficiency: float,
    figures: StepFigures,
    prices: EnginePrices,
    overhead_s: float = 0.0,
) -> int:
    """Return the number of engines elsewhere that a job should have at most.

    With so many, rollout alone fits into the time of the gradients. Where prices are known, it is
    the largest number with which a step costs no more than without any; 0 if there is none.
    `overhead_s`: seconds by which steps with engines elsewhere exceed those of balanced engines.
    """
    if figures.training_s <= 0:
        return LOWEST_REMOTE
    most = math.ceil(min(work_s / figures.training_s, MOST_REMOTE) - ROUNDING)
    if not prices.reserved_cost or not prices.engine_price or not figures.seeding:
        return max(most, LOWEST_REMOTE)
    training_s, seeding = figures.training_s, figures.seeding
    alone_cost = prices.reserved_cost * predict_step_s(
        efficiency * work_s, training_s, seeding, remote=0
    )

    def pays(remote: int) -> bool:
        hourly = prices.reserved_cost + remote * prices.engine_price
        step_s = overhead_s + predict_step_s(work_s, training_s, seeding, remote)
        return hourly * step_s <= alone_cost

    return next((n for n in range(most, 0, -1) if pays(n)), 0)
