"""Seeding time of a job, and the number of workers that may vanish of which it makes use.

`policies/offload.py` computes both after each measured step, from the counters of the job's core
and shards. The time is written to the job's row, from which its shards read it. The number limits
the workers of the spot and lent markets that the job holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale, SetSeeding
from meshrl.common.state.pool.workers.rows import PREEMPTIBLE_MARKETS
from meshrl.services.planner.forecast.work_account import (
    StepTotals,
    WorkAccount,
    WorkWindow,
    build_window,
)
from meshrl.services.planner.policies.offload import (
    EnginePrices,
    OffloadState,
    StepFigures,
    set_remote,
    update_offload,
)
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import InstancePlacement, JobInstances

RULE = "seeding"
MIN_CHANGE = 0.05  # smaller relative changes of the seeding time are not written
# updates in a row that ask for fewer engines until some leave, or for the first until it is taken
CONFIRMATIONS = 3


@dataclass(frozen=True, slots=True)
class SeedingState:
    """State of one job between passes."""

    offload: OffloadState = field(default_factory=OffloadState)
    most_remote: int | None = None  # in force; see `CONFIRMATIONS`
    confirmations: int = 0  # updates in a row that asked for another number
    account: WorkAccount = field(default_factory=WorkAccount)
    window_start: StepTotals | None = None
    # integral of engines elsewhere, and on the core's workers, since the start; worker-milliseconds
    remote_ms: float = 0.0
    seeding_ms: float = 0.0
    observed_ms: int = 0
    observed_step: int = -1  # windows begin and end where it changes, as work of a step is not even
    written_ms: int = -1  # the seeding time in the job's row


def limit_preemptible(draft: PoolDraft, job: PlannedJob, state: SeedingState | None) -> PlannedJob:
    """Return the job with a limit on the workers that may vanish, once steps are measured."""
    if state is None or state.most_remote is None:
        return job
    team = draft.get_instances(job.id)
    remote = [worker for engine in _list_remote(team) for worker in engine.workers]
    stay = sum(not _may_vanish(draft, worker) for worker in remote)
    others = team.awake_workers.difference(remote)
    vanishing = sum(_may_vanish(draft, worker) for worker in others)
    most = max(0, state.most_remote - stay) + vanishing
    markets = replace(job.requirements.markets, most_preemptible=most)
    return replace(job, requirements=replace(job.requirements, markets=markets))


def release_surplus(draft: PoolDraft, job: PlannedJob) -> None:
    """Remove engines beyond the job's limit of workers that may vanish: spot ones first, the last
    first. An only engine stays.
    """
    most = job.requirements.markets.most_preemptible
    team = draft.get_instances(job.id)
    if most is None:
        return
    held = team.awake_workers
    over = sum(_may_vanish(draft, worker) for worker in held) - most
    engines = len(team.engines) + len(team.time_sliced_engines)
    for market in reversed(PREEMPTIBLE_MARKETS):
        for engine in reversed(team.engines):
            there = {draft.workers[worker].market for worker in engine.workers}
            if over <= 0 or engines <= 1 or market not in there or engine.instance.pinned:
                continue
            draft.remove_instance(engine, Rationale(RULE, job.id, {"most_preemptible": most}))
            over -= len(engine.workers)
            engines -= 1


def update_seeding(
    draft: PoolDraft, job: PlannedJob, state: SeedingState | None
) -> SeedingState | None:
    """Measure the job's steps, and decide on its seeding time; None if it has no such engines."""
    state, team = state or SeedingState(), draft.get_instances(job.id)
    offered = draft.present_markets | ({"spot"} if draft.snapshot.settings.scaler.is_on else set())
    accepted = offered.intersection(job.requirements.markets.accepted)
    may_hold = not accepted.isdisjoint(PREEMPTIBLE_MARKETS)
    is_running = job.phase == Phase.TRAINING and not job.block_reason and team.core is not None
    if not job.requirements.needs_rollout or not (may_hold or team.time_sliced_engines):
        return _write_seed_ms(draft, job, state, -1) if state.written_ms >= 0 else None
    state = replace(state, account=state.account.credit(job.measurements))
    totals = StepTotals(
        round(state.account.total.steps), draft.snapshot.now_ms, state.account.total
    )
    remote = _count_serving(draft, _list_remote(team))
    seeding = _count_serving(draft, team.time_sliced_engines)
    is_step_end = 0 <= state.observed_step < totals.step
    if not is_running:
        return replace(state, window_start=None)
    passed_ms = max(0, totals.at_ms - state.observed_ms) if state.window_start else 0
    state = replace(
        state,
        observed_ms=totals.at_ms,
        observed_step=totals.step,
        remote_ms=state.remote_ms + remote * passed_ms,
        seeding_ms=state.seeding_ms + seeding * passed_ms,
    )
    start = state.window_start
    if start is None or totals.step < start.step:
        first = totals if is_step_end else None
        return replace(state, window_start=first, remote_ms=0.0, seeding_ms=0.0)
    window = build_window(start, totals)
    if window is not None and is_step_end and window.is_long_enough(1):
        figures = _build_figures(job, team, state, window)
        offload = update_offload(state.offload, figures, remote, _read_prices(draft, job, team))
        state = bound_remote(state, offload)
        state = replace(state, offload=offload, window_start=totals, remote_ms=0.0, seeding_ms=0.0)
    else:
        figures = None
        state = replace(state, offload=set_remote(state.offload, remote))
    can_seed = job.requirements.seeding and remote and seeding
    seed_s = state.offload.seed_s if can_seed else None
    return _write_seed_ms(
        draft, job, state, -1 if seed_s is None else round(1000 * seed_s), figures
    )


def bound_remote(state: SeedingState, offload: OffloadState) -> SeedingState:
    """Return the state with more engines at once, and with fewer after some confirmations.

    The first engines after a price that did not pay need confirmations, too.
    """
    current, found = state.most_remote, offload.most_remote
    is_unconfirmed = current is not None and found is not None and (found < current or not current)
    if is_unconfirmed and found != current and state.confirmations + 1 < CONFIRMATIONS:
        return replace(state, confirmations=state.confirmations + 1)
    return replace(state, most_remote=found, confirmations=0)


def _build_figures(
    job: PlannedJob, team: JobInstances, state: SeedingState, window: WorkWindow
) -> StepFigures:
    """Build the mean figures of the window's steps."""
    work, steps = window.work, window.steps
    trainers = job.requirements.ranks + len(team.hybrids)
    # Without staleness the engines are idle from a step's last trajectory on. Otherwise they have
    # too little to do while the staleness gate blocks groups.
    idle_s = work.shut_s if job.max_staleness else work.idle_s
    waited_s, length_ms = work.wait_s / steps, 1000 * window.seconds
    seed_s = state.offload.seed_s if state.offload.seed_s is not None else waited_s
    return StepFigures(
        trainer_idle_s=max(0.0, waited_s - seed_s),
        remote_idle_s=idle_s / max(1, job.requirements.shards) / steps,
        training_s=work.work_s / trainers / steps,
        step_s=window.step_s,
        seeding=round(state.seeding_ms / length_ms),
        remote=state.remote_ms / length_ms,
    )


def _read_prices(draft: PoolDraft, job: PlannedJob, team: JobInstances) -> EnginePrices:
    """Return the hourly cost of the job's workers that stay, and of one that may vanish."""
    settings = draft.snapshot.settings
    held = team.awake_workers
    stay = [draft.workers[one] for one in held if not _may_vanish(draft, one)]
    vanish = [draft.workers[one] for one in held if _may_vanish(draft, one)]
    offered = [
        row
        for row in draft.workers.values()
        if row.market in PREEMPTIBLE_MARKETS and row.market in job.requirements.markets.accepted
    ]
    prices = [settings.get_price(row) for row in vanish or offered] or [settings.spot_price]
    return EnginePrices(sum(map(settings.get_price, stay)), fmean(prices))


def _write_seed_ms(
    draft: PoolDraft,
    job: PlannedJob,
    state: SeedingState,
    seed_ms: int,
    figures: StepFigures | None = None,
) -> SeedingState:
    """Decide on the seeding time of a job if it differs enough from the one in force."""
    before = state.written_ms
    differs = (seed_ms < 0) != (before < 0) or abs(seed_ms - before) > MIN_CHANGE * before
    if seed_ms == before or not differs:
        return state
    inputs: dict[str, Any] = {
        "before_ms": before,
        "remote": state.offload.remote,
        "most_remote": state.offload.most_remote,
    }
    if figures is not None:
        inputs |= {
            "trainer_idle_s": round(figures.trainer_idle_s, 4),
            "remote_idle_s": round(figures.remote_idle_s, 4),
            "training_s": round(figures.training_s, 4),
            "step_s": round(figures.step_s, 4),
        }
    draft.add_decision(SetSeeding(job.id, seed_ms, Rationale(RULE, job.id, inputs)))
    return replace(state, written_ms=seed_ms)


def _may_vanish(draft: PoolDraft, worker: str) -> bool:
    return draft.workers[worker].market in PREEMPTIBLE_MARKETS


def _list_remote(team: JobInstances) -> list[InstancePlacement]:
    return [engine for engine in team.engines if engine.is_awake]


def _count_serving(draft: PoolDraft, engines: Sequence[InstancePlacement]) -> int:
    """Return the number of workers of the engines that serve, and whose leases are valid."""
    return sum(
        len(one.workers)
        for one in engines
        if one.instance.is_reconciled and draft.placeable_workers.issuperset(one.workers)
    )


def describe_seeding(state: SeedingState) -> str:
    """Describe the seeding time and the workers that may vanish; empty before the first steps."""
    if state.most_remote is None:
        return ""
    workers = f"at most {state.most_remote} workers beside the core's shorten its steps or pay"
    if state.written_ms < 0:
        return workers
    return (
        f"engines on the core's workers generate for {state.written_ms / 1000:.3g} s of a step, "
        f"then {state.offload.remote} others continue; {workers}"
    )
