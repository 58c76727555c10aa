"""The shares of jobs: who is admitted, and how many workers each has.

Jobs come by priority, then by submission. A job is admitted when what it needs at least is left by
those before it; who comes later and is small enough is admitted beside one that waits (backfill),
and makes room again when that one fits. Where not all jobs of a priority have their floor, they run
with engine and core by turns, if the pool allows that. What is left is shared by the highest
priority first: weighted max-min over workers, each job's least and most kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.requirements import JobRequirements, PlannedJob
from meshrl.common.state.pool.scheduling.feasibility import count_time_sliced_floor

MAX_NAMED_JOBS = 3  # jobs that a reason names


@dataclass(frozen=True, slots=True)
class ShareClaim:
    """What a job has on the pool already, which its share must leave it."""

    core_place: str = ""  # place of its core; empty: it has none
    pinned_workers: int = (
        0  # workers that it needs beside its core for what people have put into it
    )
    is_stranded: bool = False  # where its core is, no engine finds room beside it


@dataclass(frozen=True, slots=True)
class PoolDivision:
    """How the pool is shared."""

    workers: dict[str, int] = field(default_factory=dict)  # of each job that runs
    core_places: dict[str, str] = field(
        default_factory=dict
    )  # place that its core's ranks are to be in
    rejected: dict[str, str] = field(default_factory=dict)  # why each other job does not run
    time_slicing: bool = True  # whether engine and core of a job may share workers


@dataclass(frozen=True, slots=True)
class ShareBounds:
    """The workers that a job may have."""

    min_workers: int
    max_workers: float  # infinite: as many as there are
    weight: float


def divide_pool(
    jobs: Sequence[PlannedJob],
    workers_by_place: Mapping[str, int],
    claims: Mapping[str, ShareClaim],
    time_slicing: bool,
    place_kind: str = "host",
) -> PoolDivision:
    """The shares of jobs in the order in which they come. `places` are the numbers of usable
    workers by what those of a gang have in common, which is of this `kind`; `turns` is whether
    engines and cores may take turns.
    """
    found = PoolDivision(time_slicing=time_slicing)
    rooms = _PlaceCapacity(workers_by_place, place_kind)
    left = sum(workers_by_place.values())
    levels: list[tuple[dict[str, ShareBounds], int]] = []
    for _, grouped in groupby(jobs, key=lambda job: job.need.priority):
        level = list(grouped)
        bounds, kept = _admit_priority_level(level, left, rooms, claims, time_slicing, found)
        levels.append((bounds, kept))
        left -= kept
    for bounds, kept in levels:
        shares = fill_shares(bounds, kept + left)
        left = kept + left - sum(shares.values())
        found.workers.update(shares)
    for job in jobs:  # a core that is there need not sleep because an engine is lost
        here = has_started(job) and claims.get(job.id, ShareClaim()).core_place
        if left >= job.need.ranks and job.id in found.rejected and here:
            found.workers[job.id] = left
            del found.rejected[job.id]
            left = 0
    return found


def fill_shares(bounds: Mapping[str, ShareBounds], workers: int) -> dict[str, int]:
    """Weighted max-min shares in whole workers, each within one of the exact one. The sum of the
    least is no more than `workers`.
    """
    exact = _compute_max_min_shares(list(bounds.values()), workers)
    shares = {job: math.floor(share + 1e-9) for job, share in zip(bounds, exact, strict=True)}
    over = min(workers, round(sum(exact))) - sum(shares.values())
    parts = {job: share - shares[job] for job, share in zip(bounds, exact, strict=True)}
    for job in sorted(parts, key=lambda job: -round(parts[job], 9))[:over]:  # stable: order decides
        shares[job] += int(parts[job] > 1e-9)
    return shares


def has_started(job: PlannedJob) -> bool:
    """Whether a job has been running, so that there is something to pause."""
    return job.phase != Phase.QUEUED


def _compute_max_min_shares(bounds: Sequence[ShareBounds], workers: int) -> list[float]:
    """The exact max-min shares: as much water as all of them can hold, at one level a weight."""
    low, high = 0.0, float(workers) / min((b.weight for b in bounds), default=1.0) + 1.0
    for _ in range(100):
        level = (low + high) / 2
        if sum(min(max(b.weight * level, b.min_workers), b.max_workers) for b in bounds) > workers:
            high = level
        else:
            low = level
    return [min(max(b.weight * low, b.min_workers), b.max_workers) for b in bounds]


def _admit_priority_level(
    level_jobs: Sequence[PlannedJob],
    free_workers: int,
    capacity: _PlaceCapacity,
    claims: Mapping[str, ShareClaim],
    time_slicing: bool,
    division: PoolDivision,
) -> tuple[dict[str, ShareBounds], int]:
    """The bounds of those of a priority that run, and the workers that are kept for them."""

    def floor(job: PlannedJob, least: int) -> int:
        pinned = claims.get(job.id, ShareClaim()).pinned_workers
        return max(
            least, job.need.least, count_time_sliced_floor(job.need) + pinned if pinned else 0
        )

    full = {job.id: floor(job, job.need.worker_floor) for job in level_jobs}
    tight = time_slicing and sum(full.values()) > free_workers
    bounds: dict[str, ShareBounds] = {}
    free = free_workers
    for job in level_jobs:
        claim = claims.get(job.id, ShareClaim())
        least = floor(job, count_time_sliced_floor(job.need)) if tight else full[job.id]
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
            why = f"it needs {least} {noun}, and {free} of {total} are left{beside}"
            division.rejected[job.id] = why
        elif home := capacity.take_core_place(
            job.need, "" if claim.is_stranded else claim.core_place
        ):
            division.core_places[job.id] = home
            most = max(job.need.most or math.inf, least)
            bounds[job.id] = ShareBounds(least, most, job.need.share)
            free -= least
        else:
            why = f"no {capacity.place_kind} has {job.need.ranks} workers left for its core"
            division.rejected[job.id] = why
    kept = sum(bound.min_workers for bound in bounds.values())
    if tight:  # those that are here go before lower priorities until they have their floors
        kept = min(free_workers, sum(max(full[job], bounds[job].min_workers) for job in bounds))
    return bounds, kept


class _PlaceCapacity:
    """Workers of each place that no core is on yet."""

    def __init__(self, workers_by_place: Mapping[str, int], place_kind: str) -> None:
        self.total_workers, self.place_kind = workers_by_place, place_kind
        self._free_workers = dict(workers_by_place)
        self._reserved_workers = dict.fromkeys(
            workers_by_place, 0
        )  # for engines of several workers; no core leaves one

    def take_core_place(self, requirements: JobRequirements, current_place: str) -> str:
        """The place that a core goes to: the one that it is in, or else the one with most room,
        where an engine of several workers finds room beside it if there is such a place; empty when
        there is none.
        """
        ranks, engine = (
            requirements.ranks,
            requirements.smallest_engine if requirements.rolls_out else 0,
        )
        fits = [place for place, free in self._free_workers.items() if free >= ranks]
        if not fits:
            return ""
        if current_place not in fits:
            current_place = max(
                fits,
                key=lambda place: (
                    self._can_fit_engine(place, requirements),
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
        """Whether the engines of jobs before, and one of this job, have room beside its core."""
        left = {
            p: self._count_unreserved(p) - (requirements.ranks if p == place else 0)
            for p in self._free_workers
        }
        alone = requirements.smallest_engine == 1 or not requirements.rolls_out
        return left[place] >= 0 and (alone or max(left.values()) >= requirements.smallest_engine)

    def _count_unreserved(self, place: str) -> int:
        return self._free_workers[place] - self._reserved_workers[place]
