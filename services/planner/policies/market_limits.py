"""Limits of a job on the workers that it takes: their markets, their number and their cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from meshrl.common.state.pool.demand.requirements import MarketLimits, PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale
from meshrl.common.state.pool.workers.rows import MARKETS, PREEMPTIBLE_MARKETS
from meshrl.services.planner.pool.draft import PoolDraft

ENGINE_MARKETS = MARKETS[::-1]  # engines leave workers that stay to cores


def explain_not_taken(draft: PoolDraft, job: PlannedJob, workers: Collection[str]) -> str:
    """Return why a job does not take workers beside those that it has; empty if it takes them."""
    limits, settings = job.requirements.markets, draft.snapshot.settings
    if limits == MarketLimits():
        return ""
    held = draft.get_instances(job.id).awake_workers
    rows = [draft.workers[worker] for worker in held.union(workers)]
    counts = Counter(row.market for row in rows)
    for market in {draft.workers[worker].market for worker in workers if worker not in held}:
        if market not in limits.accepted:
            return f"{job.id} takes no {market} workers (pool.markets)"
        if counts[market] > limits.get_most(market):
            most = f"pool.workers.most_{market} is {limits.get_most(market)}"
            return f"{job.id} would have {counts[market]} {market} workers, and {most}"
    vanishing = sum(counts[market] for market in PREEMPTIBLE_MARKETS)
    adds = any(draft.workers[worker].market in PREEMPTIBLE_MARKETS for worker in workers)
    if limits.most_preemptible is not None and adds and vanishing > limits.most_preemptible:
        return (
            f"{job.id} would have {vanishing} workers that may vanish, and more than "
            f"{limits.most_preemptible} do not pay"
        )
    cost = sum(map(settings.get_price, rows))
    if 0 < limits.max_cost_per_hour < cost and not held.issuperset(workers):
        return (
            f"an hour of the workers of {job.id} would cost {cost:,.4g}, and "
            f"pool.max_cost_per_hour is {limits.max_cost_per_hour:,.4g}"
        )
    return ""


def release_untaken(draft: PoolDraft, job: PlannedJob) -> None:
    """Remove instances from workers whose market the job does not take, or not so many of.

    A host that returns may have another market. An instance that the job needs stays until as many
    workers that it takes are free. A core also waits for a checkpoint.
    """
    limits, team = job.requirements.markets, draft.get_instances(job.id)
    if limits == MarketLimits():
        return
    counts = Counter(draft.workers[worker].market for worker in team.awake_workers)
    if all(count <= limits.get_most(market) for market, count in counts.items()):
        return
    engines = len(team.engines) + len(team.time_sliced_engines)
    free = Counter(
        draft.get_place(worker)
        for worker in draft.idle_workers
        if not explain_not_taken(draft, job, [worker])
    )
    removable = [*reversed(team.hybrids), *reversed(team.engines)]
    if team.core is not None and job.has_checkpoint and not team.time_sliced_engines:
        removable += [team.core] if len(team.core.workers) == 1 else []
    for seated in removable:
        markets = {draft.workers[worker].market for worker in seated.workers}
        over = [market for market in markets if counts[market] > limits.get_most(market)]
        if not over or not seated.is_awake or seated.instance.pinned:
            continue
        is_engine = seated in team.engines
        if not (seated in team.hybrids or (is_engine and engines > 1)):
            place, most = max(free.items(), key=lambda one: (one[1], one[0]), default=("", 0))
            if most < len(seated.workers):
                continue
            free[place] -= len(seated.workers)
        engines -= is_engine
        counts.subtract(draft.workers[worker].market for worker in seated.workers)
        draft.remove_instance(seated, Rationale("markets", job.id, {"markets": sorted(over)}))


def list_engine_markets(draft: PoolDraft, job: PlannedJob) -> list[str]:
    """List the markets of which the job takes one more worker, in the order of engines."""
    limits = job.requirements.markets
    if limits == MarketLimits():
        return list(ENGINE_MARKETS)
    held = draft.get_instances(job.id).awake_workers
    counts = Counter(draft.workers[worker].market for worker in held)
    vanishing = sum(counts[market] for market in PREEMPTIBLE_MARKETS)
    most = math.inf if limits.most_preemptible is None else limits.most_preemptible
    return [
        market
        for market in ENGINE_MARKETS
        if counts[market] < limits.get_most(market)
        and (market not in PREEMPTIBLE_MARKETS or vanishing < most)
    ]


def rank_for_core(draft: PoolDraft, worker: str) -> int:
    """Return the order in which cores take workers: those that stay come first."""
    return MARKETS.index(draft.workers[worker].market)


def rank_for_engine(draft: PoolDraft, worker: str) -> int:
    """Return the order in which engines take workers: those that stay are left to cores."""
    return -rank_for_core(draft, worker)
