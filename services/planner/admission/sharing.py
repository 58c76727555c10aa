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
from meshrl.common.state.pool.demand.needs import Need, PlannedJob
from meshrl.common.state.pool.placing.fitting import tight_floor

NAMED = 3  # jobs that a reason names


@dataclass(frozen=True, slots=True)
class ShareClaim:
    """What a job has on the pool already, which its share must leave it."""

    home: str = ""  # place of its core; empty: it has none
    pinned: int = 0  # workers that it needs beside its core for what people have put into it
    stranded: bool = False  # where its core is, no engine finds room beside it


@dataclass(frozen=True, slots=True)
class PoolDivision:
    """How the pool is shared."""

    workers: dict[str, int] = field(default_factory=dict)  # of each job that runs
    homes: dict[str, str] = field(default_factory=dict)  # place that its core's ranks are to be in
    refused: dict[str, str] = field(default_factory=dict)  # why each other job does not run
    turns: bool = True  # whether engine and core of a job may share workers


@dataclass(frozen=True, slots=True)
class ShareBounds:
    """The workers that a job may have."""

    least: int
    most: float  # infinite: as many as there are
    weight: float


def divide(
    jobs: Sequence[PlannedJob],
    places: Mapping[str, int],
    claims: Mapping[str, ShareClaim],
    turns: bool,
    kind: str = "host",
) -> PoolDivision:
    """The shares of jobs in the order in which they come. `places` are the numbers of usable
    workers by what those of a gang have in common, which is of this `kind`; `turns` is whether
    engines and cores may take turns.
    """
    found = PoolDivision(turns=turns)
    rooms = _Rooms(places, kind)
    left = sum(places.values())
    levels: list[tuple[dict[str, ShareBounds], int]] = []
    for _, grouped in groupby(jobs, key=lambda job: job.need.priority):
        level = list(grouped)
        bounds, kept = _admit(level, left, rooms, claims, turns, found)
        levels.append((bounds, kept))
        left -= kept
    for bounds, kept in levels:
        shares = fill(bounds, kept + left)
        left = kept + left - sum(shares.values())
        found.workers.update(shares)
    for job in jobs:  # a core that is there need not sleep because an engine is lost
        here = started(job) and claims.get(job.id, ShareClaim()).home
        if left >= job.need.ranks and job.id in found.refused and here:
            found.workers[job.id] = left
            del found.refused[job.id]
            left = 0
    return found


def fill(bounds: Mapping[str, ShareBounds], workers: int) -> dict[str, int]:
    """Weighted max-min shares in whole workers, each within one of the exact one. The sum of the
    least is no more than `workers`.
    """
    exact = _level(list(bounds.values()), workers)
    shares = {job: math.floor(share + 1e-9) for job, share in zip(bounds, exact, strict=True)}
    over = min(workers, round(sum(exact))) - sum(shares.values())
    parts = {job: share - shares[job] for job, share in zip(bounds, exact, strict=True)}
    for job in sorted(parts, key=lambda job: -round(parts[job], 9))[:over]:  # stable: order decides
        shares[job] += int(parts[job] > 1e-9)
    return shares


def started(job: PlannedJob) -> bool:
    """Whether a job has been running, so that there is something to pause."""
    return job.phase != Phase.QUEUED


def _level(bounds: Sequence[ShareBounds], workers: int) -> list[float]:
    """The exact max-min shares: as much water as all of them can hold, at one level a weight."""
    low, high = 0.0, float(workers) / min((b.weight for b in bounds), default=1.0) + 1.0
    for _ in range(100):
        level = (low + high) / 2
        if sum(min(max(b.weight * level, b.least), b.most) for b in bounds) > workers:
            high = level
        else:
            low = level
    return [min(max(b.weight * low, b.least), b.most) for b in bounds]


def _admit(
    level: Sequence[PlannedJob],
    left: int,
    rooms: _Rooms,
    claims: Mapping[str, ShareClaim],
    turns: bool,
    found: PoolDivision,
) -> tuple[dict[str, ShareBounds], int]:
    """The bounds of those of a priority that run, and the workers that are kept for them."""

    def floor(job: PlannedJob, least: int) -> int:
        pinned = claims.get(job.id, ShareClaim()).pinned
        return max(least, job.need.least, tight_floor(job.need) + pinned if pinned else 0)

    full = {job.id: floor(job, job.need.floor) for job in level}
    tight = turns and sum(full.values()) > left
    bounds: dict[str, ShareBounds] = {}
    free = left
    for job in level:
        claim = claims.get(job.id, ShareClaim())
        least = floor(job, tight_floor(job.need)) if tight else full[job.id]
        if least > free:
            before = [*found.homes]
            more = f" and {len(before) - NAMED} more" if len(before) > NAMED else ""
            beside = f" beside {', '.join(before[:NAMED])}{more}" if before else ""
            noun, total = "worker" if least == 1 else "workers", sum(rooms.had.values())
            why = f"it needs {least} {noun}, and {free} of {total} are left{beside}"
            found.refused[job.id] = why
        elif home := rooms.take(job.need, "" if claim.stranded else claim.home):
            found.homes[job.id] = home
            most = max(job.need.most or math.inf, least)
            bounds[job.id] = ShareBounds(least, most, job.need.share)
            free -= least
        else:
            why = f"no {rooms.kind} has {job.need.ranks} workers left for its core"
            found.refused[job.id] = why
    kept = sum(bound.least for bound in bounds.values())
    if tight:  # those that are here go before lower priorities until they have their floors
        kept = min(left, sum(max(full[job], bounds[job].least) for job in bounds))
    return bounds, kept


class _Rooms:
    """Workers of each place that no core is on yet."""

    def __init__(self, places: Mapping[str, int], kind: str) -> None:
        self.had, self.kind = places, kind
        self._free = dict(places)
        self._kept = dict.fromkeys(places, 0)  # for engines of several workers; no core leaves one

    def take(self, need: Need, home: str) -> str:
        """The place that a core goes to: the one that it is in, or else the one with most room,
        where an engine of several workers finds room beside it if there is such a place; empty when
        there is none.
        """
        ranks, engine = need.ranks, need.smallest if need.rolls_out else 0
        fits = [place for place, free in self._free.items() if free >= ranks]
        if not fits:
            return ""
        if home not in fits:
            home = max(fits, key=lambda place: (self._leaves(place, need), self._free[place]))
        self._free[home] -= ranks
        if engine > 1 and (beside := [p for p in self._free if self._room(p) >= engine]):
            self._kept[min(beside, key=self._room)] += engine
        return home

    def _leaves(self, place: str, need: Need) -> bool:
        """Whether the engines of jobs before, and one of this job, have room beside its core."""
        left = {p: self._room(p) - (need.ranks if p == place else 0) for p in self._free}
        alone = need.smallest == 1 or not need.rolls_out
        return left[place] >= 0 and (alone or max(left.values()) >= need.smallest)

    def _room(self, place: str) -> int:
        return self._free[place] - self._kept[place]
