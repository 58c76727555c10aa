"""Shares of jobs: which jobs are admitted, and how many workers each job has.

Jobs are ordered by priority, then by submission. A job is admitted when earlier jobs leave its
minimum number of workers. A later job that is small enough is admitted beside a waiting job
(backfill), and frees its workers when the waiting job fits. If not all jobs of a priority have
their floor, they time-slice engine and core, if the pool allows time slicing. The remaining workers
are shared by weighted max-min, highest priority first, within each job's minimum and maximum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.requirements import JobRequirements, PlannedJob
from meshrl.common.state.pool.workers.rows import MARKETS

MAX_NAMED_JOBS = 3  # number of jobs named in a reason


@dataclass(frozen=True, slots=True)
class ShareClaim:
    """Workers and place that a job already has, which its share must leave to it."""

    core_place: str = ""  # place of its core; empty: no core
    pinned_workers: int = 0  # workers beside its core for instances that a user has pinned
    is_stranded: bool = False  # no engine fits beside its core


@dataclass(frozen=True, slots=True)
class PoolDivision:
    """Division of the pool among jobs."""

    workers: dict[str, int] = field(default_factory=dict)  # by admitted job
    # place for the ranks of each core; guests have the place of their partner's core
    core_places: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)  # by rejected job: the reason
    time_slicing: bool = True  # True if engine and core of a job may share workers
    # of jobs whose cores compute on the workers of another job's core: that job
    partners: dict[str, str] = field(default_factory=dict)

    def get_companions(self, job: str) -> list[str]:
        """Return the jobs whose cores share the workers of a job's core."""
        partner = self.partners.get(job, job)
        group = [partner, *(guest for guest, one in self.partners.items() if one == partner)]
        return [one for one in group if one != job]


@dataclass(frozen=True, slots=True)
class ShareBounds:
    """Bounds of the number of workers of a job."""

    min_workers: int
    max_workers: float  # infinite: no limit
    weight: float
    shared_workers: float = 0.0  # that it uses beside these; negative: that it lends


def divide_pool(
    jobs: Sequence[PlannedJob],
    workers_by_place: Mapping[str, int],
    claims: Mapping[str, ShareClaim],
    time_slicing: bool,
    place_kind: str = "host",
    partners: Mapping[str, str] | None = None,
    markets_by_place: Mapping[str, Mapping[str, int]] | None = None,
) -> PoolDivision:
    """Divide the pool among jobs, in the order of the jobs. `workers_by_place` counts the usable
    workers of each place; a gang lies in one place, which is of `place_kind`. `time_slicing`
    permits engines and cores to share workers. `partners`: of jobs whose cores share the workers
    of another job's core, that job. Each of the two counts with half of these workers.
    `markets_by_place` counts the workers of each market in each place; None: all are reserved.
    """
    guests = partners or {}
    capacity = _PoolCapacity(workers_by_place, place_kind, markets_by_place)
    found = _divide_pool_once(jobs, capacity, claims, time_slicing, guests)
    alone = {guest for guest, partner in found.partners.items() if partner not in found.workers}
    if alone:  # the partner has no workers
        kept = {guest: partner for guest, partner in guests.items() if guest not in alone}
        about = workers_by_place, claims, time_slicing, place_kind, kept, markets_by_place
        return divide_pool(jobs, *about)
    ranks = {job.id: job.requirements.ranks for job in jobs}
    for guest in found.partners:
        found.workers[guest] += ranks[guest]
    return found


def _divide_pool_once(
    jobs: Sequence[PlannedJob],
    capacity: _PoolCapacity,
    claims: Mapping[str, ShareClaim],
    time_slicing: bool,
    guests: Mapping[str, str],
) -> PoolDivision:
    """Divide the pool; shares of guests are without the workers that they share."""
    found = PoolDivision(time_slicing=time_slicing)
    remaining_workers = sum(capacity.total_workers.values())
    levels: list[tuple[dict[str, ShareBounds], int]] = []
    for _, grouped in groupby(jobs, key=lambda job: job.requirements.priority):
        level = list(grouped)
        bounds, reserved_workers = _admit_priority_level(
            level, remaining_workers, capacity, claims, time_slicing, found, guests
        )
        levels.append((bounds, reserved_workers))
        remaining_workers -= reserved_workers
    lent = _count_lent_workers(jobs, found.partners)
    for bounds, reserved_workers in levels:
        bounds = {
            job: replace(bound, shared_workers=bound.shared_workers - lent[job] / 2)
            for job, bound in bounds.items()
        }
        shares = fill_shares(bounds, reserved_workers + remaining_workers)
        remaining_workers = reserved_workers + remaining_workers - sum(shares.values())
        found.workers.update(shares)
    for job in jobs:  # a running core need not sleep because an engine is lost
        here = has_started(job) and claims.get(job.id, ShareClaim()).core_place
        if remaining_workers >= job.requirements.ranks and job.id in found.rejected and here:
            found.workers[job.id] = remaining_workers
            del found.rejected[job.id]
            remaining_workers = 0
    return found


def _count_lent_workers(jobs: Sequence[PlannedJob], partners: Mapping[str, str]) -> Counter[str]:
    """Count the workers of each job's core that guests share."""
    lent: Counter[str] = Counter()
    for job in jobs:
        if job.id in partners:
            lent[partners[job.id]] += job.requirements.ranks
    return lent


def fill_shares(bounds: Mapping[str, ShareBounds], workers: int) -> dict[str, int]:
    """Compute weighted max-min shares in whole workers, each within one worker of the exact share.
    The sum of the minimums must not exceed `workers`.
    """
    exact = _compute_max_min_shares(list(bounds.values()), workers)
    shares = {job: math.floor(share + 1e-9) for job, share in zip(bounds, exact, strict=True)}
    over = min(workers, round(sum(exact))) - sum(shares.values())
    parts = {job: share - shares[job] for job, share in zip(bounds, exact, strict=True)}
    for job in sorted(parts, key=lambda job: -round(parts[job], 9))[
        :over
    ]:  # stable sort: order decides
        shares[job] += int(parts[job] > 1e-9)
    return shares


def has_started(job: PlannedJob) -> bool:
    """Return True if the job has run before, so that it is paused and not queued."""
    return job.phase != Phase.QUEUED


def _compute_max_min_shares(bounds: Sequence[ShareBounds], workers: int) -> list[float]:
    """Compute the exact max-min shares by bisection of the level per weight."""

    def share(bound: ShareBounds, level: float) -> float:
        wanted = bound.weight * level - bound.shared_workers
        return min(max(wanted, bound.min_workers), bound.max_workers)

    offset = max((bound.shared_workers for bound in bounds), default=0.0)
    low = min((-abs(bound.shared_workers) / bound.weight for bound in bounds), default=0.0)
    high = (workers + max(offset, 0.0)) / min((b.weight for b in bounds), default=1.0) + 1.0
    for _ in range(100):
        level = (low + high) / 2
        if sum(share(bound, level) for bound in bounds) > workers:
            high = level
        else:
            low = level
    return [share(bound, low) for bound in bounds]


def _admit_priority_level(
    level_jobs: Sequence[PlannedJob],
    free_workers: int,
    capacity: _PoolCapacity,
    claims: Mapping[str, ShareClaim],
    time_slicing: bool,
    division: PoolDivision,
    guests: Mapping[str, str],
) -> tuple[dict[str, ShareBounds], int]:
    """Return the bounds of the admitted jobs of one priority and the workers reserved for them."""

    def floor(job: PlannedJob, *, is_tight: bool) -> int:
        pinned, needs = claims.get(job.id, ShareClaim()).pinned_workers, job.requirements
        most = max(needs.time_sliced_floor if is_tight else needs.worker_floor, needs.min_workers)
        if pinned:
            has_own_scoring = needs.needs_scoring and needs.can_share_scoring and not is_tight
            most = max(most, needs.time_sliced_floor + has_own_scoring + pinned)
        return most - needs.ranks if job.id in guests else most

    full = {job.id: floor(job, is_tight=False) for job in level_jobs}
    tight = time_slicing and sum(full.values()) > free_workers
    bounds: dict[str, ShareBounds] = {}
    free = free_workers
    for job in level_jobs:
        claim = claims.get(job.id, ShareClaim())
        least = floor(job, is_tight=True) if tight else full[job.id]
        if least > free:
            before = [*division.core_places]
            more = (
                f" and {len(before) - MAX_NAMED_JOBS} more" if len(before) > MAX_NAMED_JOBS else ""
            )
            beside = f" beside {', '.join(before[:MAX_NAMED_JOBS])}{more}" if before else ""
            noun, total = (
                "worker" if least == 1 else "workers",
                sum(capacity.total_workers.values()),
            )
            why = f"it needs {least} {noun}, and {free} of {total} are free{beside}"
            why = why if total else f"it needs {least} {noun}, and the mesh has none at present"
            if job.requirements.colocate == "never":
                why += ', and pool.colocate = "never" keeps its engines off the core\'s workers'
            division.rejected[job.id] = why
        elif least > (accepted := capacity.count_accepted(job.requirements)):
            names = " and ".join(job.requirements.markets.accepted)
            division.rejected[job.id] = (
                f"it needs {least} workers, and {accepted} free ones are of markets and numbers "
                f"that it takes (pool.markets: {names})"
            )
        elif job.id in guests:
            ranks = job.requirements.ranks
            most = max((job.requirements.max_workers or math.inf) - ranks, least)
            division.partners[job.id] = guests[job.id]
            bounds[job.id] = ShareBounds(least, most, job.requirements.share, ranks / 2)
            free -= least
            capacity.take_workers(job.requirements, least)
        elif home := capacity.take_core_place(
            job.requirements, "" if claim.is_stranded else claim.core_place
        ):
            division.core_places[job.id] = home
            most = max(job.requirements.max_workers or math.inf, least)
            bounds[job.id] = ShareBounds(least, most, job.requirements.share)
            free -= least
            capacity.take_workers(job.requirements, least)
        else:
            why = f"no {capacity.place_kind} has {job.requirements.ranks} workers left for its core"
            division.rejected[job.id] = why
    reserved_workers = sum(bound.min_workers for bound in bounds.values())
    if tight:  # admitted jobs take their floors before lower priorities
        reserved_workers = min(
            free_workers, sum(max(full[job], bounds[job].min_workers) for job in bounds)
        )
    return bounds, reserved_workers


class _PoolCapacity:
    """Workers of each place that have no core yet, and those of each market that no job has."""

    def __init__(
        self,
        workers_by_place: Mapping[str, int],
        place_kind: str,
        markets_by_place: Mapping[str, Mapping[str, int]] | None,
    ) -> None:
        self.total_workers, self.place_kind = workers_by_place, place_kind
        self._markets_by_place = markets_by_place or {
            place: {MARKETS[0]: count} for place, count in workers_by_place.items()
        }
        self._free_of_market = Counter[str]()
        for counts in self._markets_by_place.values():
            self._free_of_market.update(counts)
        self._free_workers = dict(workers_by_place)
        # for engines of several workers; no core takes them
        self._reserved_workers = dict.fromkeys(workers_by_place, 0)

    def count_accepted(self, requirements: JobRequirements) -> int:
        """Return the number of free workers of the markets that a job takes, within its limits."""
        return requirements.markets.count_within(self._free_of_market)

    def take_workers(self, requirements: JobRequirements, count: int) -> None:
        """Take the workers of a job's minimum: for its core those that stay, else the others."""
        ranks = min(requirements.ranks, count)
        for needed, order in (ranks, MARKETS), (count - ranks, MARKETS[::-1]):
            remaining = needed
            for market in order:
                most = min(remaining, requirements.markets.get_most(market))
                taken = int(min(most, self._free_of_market[market]))
                self._free_of_market[market] -= taken
                remaining -= taken

    def take_core_place(self, requirements: JobRequirements, current_place: str) -> str:
        """Reserve a place for a core and return it, or an empty string if none fits. Prefer the
        current place, else places with room for an engine of several workers, then those whose
        workers stay, then the place with most free workers.
        """
        ranks, engine = (
            requirements.ranks,
            requirements.smallest_engine if requirements.needs_rollout else 0,
        )
        accepted = requirements.markets.accepted
        fits = [
            place
            for place, free in self._free_workers.items()
            if min(free, self._count_of_markets(place, accepted)) >= ranks
        ]
        if not fits:
            return ""
        if current_place not in fits:
            current_place = max(
                fits,
                key=lambda place: (
                    self._can_fit_engine(place, requirements),
                    min(ranks, self._count_of_markets(place, MARKETS[:1])),
                    self._free_workers[place],
                ),
            )
        self._free_workers[current_place] -= ranks
        if engine > 1 and (
            beside := [p for p in self._free_workers if self._count_unreserved(p) >= engine]
        ):
            self._reserved_workers[min(beside, key=self._count_unreserved)] += engine
        return current_place

    def _can_fit_engine(self, place: str, requirements: JobRequirements) -> bool:
        """Return True if the engines of earlier jobs and one of this job fit beside its core."""
        remaining_by_place = {
            p: self._count_unreserved(p) - (requirements.ranks if p == place else 0)
            for p in self._free_workers
        }
        alone = requirements.smallest_engine == 1 or not requirements.needs_rollout
        return remaining_by_place[place] >= 0 and (
            alone or max(remaining_by_place.values()) >= requirements.smallest_engine
        )

    def _count_of_markets(self, place: str, markets: Sequence[str]) -> int:
        return sum(self._markets_by_place[place].get(market, 0) for market in markets)

    def _count_unreserved(self, place: str) -> int:
        return self._free_workers[place] - self._reserved_workers[place]
