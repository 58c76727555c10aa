"""Limits of a job on the workers that it takes: their markets, their number and their cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from meshrl.common.state.pool.demand.requirements import MarketLimits, PlannedJob
from meshrl.common.state.pool.workers.rows import MARKETS, PREEMPTIBLE_MARKETS
from meshrl.services.planner.pool.draft import PoolDraft

ENGINE_MARKETS = MARKETS[::-1]  # engines leave workers that stay to cores


def explain_not_taken(draft: PoolDraft, job: PlannedJob, workers: Collection[str]) -> str:
    """Return why a job does not take workers beside those that it has; empty if it takes them."""
    limits, settings = job.requirements.markets, draft.snapshot.settings
    if limits == MarketLimits():
        return ""
    seats = draft.placements_by_job.get(job.id, {}).values()
    held = {worker for seated in seats if seated.is_awake for worker in seated.workers}
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


def rank_for_core(draft: PoolDraft, worker: str) -> int:
    """Return the order in which cores take workers: those that stay come first."""
    return MARKETS.index(draft.workers[worker].market)


def rank_for_engine(draft: PoolDraft, worker: str) -> int:
    """Return the order in which engines take workers: those that stay are left to cores."""
    return -rank_for_core(draft, worker)
