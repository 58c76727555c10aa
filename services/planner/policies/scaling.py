"""Number of spot hosts that the pool's provider is to run, from the demand of the jobs.

RLBoost (arXiv 2510.19225, Algorithm 1) bounds the preemptible workers of a job by the number with
which its rollout fits into its training time. This module adds the demand of all jobs and applies
the limits of `[pool.scaler]`. Hosts are requested at once, and given back after
`release_after_s` without instances. A host with instances is never given back: its job first has to
leave it. Spot workers that no job takes are not requested again for a while.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshrl.common.state.pool.demand.requirements import JobRequirements
from meshrl.common.state.pool.scheduling.snapshot import PoolSnapshot
from meshrl.common.state.pool.store.spot_scaling import RELEASED, ScalingPlan
from meshrl.common.state.pool.workers.rows import PREEMPTIBLE_MARKETS, WorkerRow
from meshrl.services.planner.pool.draft import PoolDraft

SPOT = "spot"
# A job that left spot workers idle for `release_after_s` gets none for so many times as long.
DECLINED_PERIODS = 10
MAX_NAMED_JOBS = 3  # in a reason


@dataclass(frozen=True, slots=True)
class JobDemand:
    """Spot workers that one job has and wants."""

    held: int
    wanted: int


def plan_scaling(
    draft: PoolDraft, most_preemptible: Mapping[str, int | None], plan: ScalingPlan | None
) -> ScalingPlan | None:
    """Return the plan of the pool's spot hosts after `plan`, that of the last pass.

    `draft` has all placements of this pass. `most_preemptible`: by job, its bound on workers
    that may vanish; None or missing: not measured. Returns None if the pool has no scaler.
    """
    snapshot = draft.snapshot
    settings, now_ms = snapshot.settings.scaler, snapshot.now_ms
    if not settings.is_on:
        return None
    if snapshot.is_gathering_workers:
        return plan
    plan = plan or ScalingPlan(since_ms=now_ms)
    release_after_ms = int(1000 * settings.release_after_s)
    present = _find_present_hosts(snapshot)
    idle_since_ms = {
        host: plan.idle_since_ms.get(host, now_ms)
        for host, workers in present.items()
        if not any(draft.placements_by_worker[worker.id] for worker in workers)
    }
    unwanted = [h for h, since in idle_since_ms.items() if now_ms - since >= release_after_ms]
    price = _get_spot_price(snapshot)
    demands = {
        job.id: _compute_demand(draft, job.id, job.requirements, most_preemptible, price)
        for job in snapshot.jobs
    }
    declined = _update_declined(plan, demands, bool(unwanted), now_ms, release_after_ms)
    workers = sum(
        min(demand.held, demand.wanted) if job in declined else demand.wanted
        for job, demand in demands.items()
    )
    wanted = math.ceil(workers / settings.workers_per_host)
    most, limit = _limit_hosts(snapshot, price)
    affordable = min(wanted, most)
    surplus_since_ms = plan.surplus_since_ms or now_ms
    is_surplus = plan.surplus_since_ms and now_ms - surplus_since_ms >= release_after_ms
    hosts = affordable if is_surplus else max(affordable, plan.hosts)
    hosts = max(hosts, len(present) - len(unwanted))
    first = sorted(unwanted, key=lambda h: (h not in plan.release, idle_since_ms[h], h))
    release = tuple(first[: max(0, len(present) - hosts)])
    idle_since_ms |= dict.fromkeys(idle_since_ms.keys() & set(plan.release) - set(release), now_ms)
    return ScalingPlan(
        hosts=hosts,
        present=len(present),
        release=release,
        reason=_explain(demands, declined, limit if wanted > most else ""),
        since_ms=plan.since_ms,
        surplus_since_ms=surplus_since_ms if hosts > affordable else 0,
        idle_since_ms=idle_since_ms,
        declined=declined,
    )


def _find_present_hosts(snapshot: PoolSnapshot) -> dict[str, list[WorkerRow]]:
    """Return the live workers of each spot host that is up and stays."""
    up = {
        host.name for host in snapshot.hosts if host.alive and host.drain_reason in ("", RELEASED)
    }
    found: dict[str, list[WorkerRow]] = {}
    for worker in snapshot.workers:
        if worker.market == SPOT and worker.alive and worker.host in up:
            found.setdefault(worker.host, []).append(worker)
    return found


def _get_spot_price(snapshot: PoolSnapshot) -> float:
    """Return the price of an hour of a further spot worker; 0: unknown."""
    known = (snapshot.settings.get_price(w) for w in snapshot.workers if w.market == SPOT)
    return snapshot.settings.spot_price or max(known, default=0.0)


def _compute_demand(
    draft: PoolDraft,
    job: str,
    needs: JobRequirements,
    most_preemptible: Mapping[str, int | None],
    price: float,
) -> JobDemand:
    """Return the spot workers that a job has, and those that it wants within its own limits."""
    seats = draft.placements_by_job.get(job, {}).values()
    rows = [draft.workers[w] for w in {w for seat in seats if seat.is_awake for w in seat.workers}]
    held = sum(row.market == SPOT for row in rows)
    limits, others = needs.markets, [row for row in rows if row.market != SPOT]
    most = most_preemptible.get(job)
    wanted: float | None = None
    if most is not None:
        wanted = most - (sum(row.market in PREEMPTIBLE_MARKETS for row in rows) - held)
    if wanted is None and limits.most_spot:
        wanted = limits.most_spot
    if wanted is None:  # one more, or what it cannot run without
        least = max(needs.time_sliced_floor, needs.min_workers)
        wanted = held + max(needs.smallest_engine, least - len(rows))
    wanted = min(wanted, limits.get_most(SPOT))
    if needs.max_workers:
        wanted = min(wanted, needs.max_workers - len(others))
    if limits.max_cost_per_hour and price:
        spent = sum(map(draft.snapshot.settings.get_price, others))
        wanted = min(wanted, (limits.max_cost_per_hour - spent + 1e-9) // price)
    return JobDemand(held, int(max(0, wanted)))


def _update_declined(
    plan: ScalingPlan,
    demands: Mapping[str, JobDemand],
    is_idle: bool,
    now_ms: int,
    release_after_ms: int,
) -> dict[str, tuple[int, int]]:
    """Return the jobs that get no more spot workers, as they leave those that exist idle."""
    declined = {
        job: (held, until_ms)
        for job, (held, until_ms) in plan.declined.items()
        if job in demands and demands[job].held == held and now_ms < until_ms
    }
    if is_idle and not plan.release:
        until_ms = now_ms + DECLINED_PERIODS * release_after_ms
        for job, demand in demands.items():
            if demand.wanted > demand.held:
                declined.setdefault(job, (demand.held, until_ms))
    return declined


def _limit_hosts(snapshot: PoolSnapshot, price: float) -> tuple[int, str]:
    """Return the largest number of hosts within the scaler's limits, and the key that sets it."""
    settings = snapshot.settings.scaler
    most, key = settings.most_hosts, "pool.scaler.most"
    if settings.max_cost_per_hour and price:
        hourly_cost = price * settings.workers_per_host
        by_cost = int((settings.max_cost_per_hour + 1e-9) // hourly_cost)
        if by_cost < most:
            most, key = by_cost, "pool.scaler.max_cost_per_hour"
    return most, f"{key} permits {most} host{'s' * (most != 1)}"


def _explain(
    demands: Mapping[str, JobDemand], declined: Mapping[str, tuple[int, int]], limit: str
) -> str:
    """Return a sentence on the demand of the jobs."""
    wanting = [
        f"{job} leaves further ones idle" if job in declined else f"{job} wants {demand.wanted}"
        for job, demand in demands.items()
        if demand.wanted
    ]
    more = len(wanting) - MAX_NAMED_JOBS
    named = [*wanting[:MAX_NAMED_JOBS], *([f"{more} more jobs want some"] if more > 0 else [])]
    return "; ".join([", ".join(named) or "no job wants spot workers", *([limit] if limit else [])])
