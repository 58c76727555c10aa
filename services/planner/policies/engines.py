"""The engines of a job: gangs of so many workers of one host as their degree of tensor parallelism.

Without a wish they are of the smallest degree whose part of the parameters workers have room for.
`shape` brings them to the degrees that somebody wishes for, with as few changes as possible: an
engine that has such a degree stays, others are merged and split. One that serves stays until
another one does, if workers allow that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import Why
from meshrl.common.state.pool.placing.snapshot import Move
from meshrl.common.state.pool.store.documents import numbered
from meshrl.common.state.pool.workers.rows import Role
from meshrl.services.planner.policies.gathering import (
    NEVER,
    GatheredWorkers,
    gather,
    helps,
    holds,
    idle,
)
from meshrl.services.planner.policies.moves import way_back
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.team import Seated

HELPER, PINNED, OTHERS = 2, 5, 6  # what those cost who leave for a job's only engine
SURPLUS, SPARE = 1, 2  # and for a shape: an engine of another degree, a helper too many


def grow(draft: Draft, job: PlannedJob, most: int, why: Why) -> int:
    """Engines on idle workers, of at most so many together; how many they have."""
    taken = 0
    for degree in job.need.degrees:
        if degree == 1:
            while taken < most and (worker := _alone(draft, job)):
                draft.seat([worker], job.id, Role.ROLLOUT, why)
                taken += 1
            continue
        if most - taken < degree:
            break
        for there in idle(draft, job.need, degree).values():
            for start in range(0, len(there) - degree + 1, degree):
                if most - taken >= degree:
                    draft.seat(there[start : start + degree], job.id, Role.ROLLOUT, why)
                    taken += degree
    return taken


def place(draft: Draft, job: PlannedJob, most: int, why: Why, repair: Why) -> None:
    """A job's only engine, of at most so many workers: on idle ones, or where helpers and smaller
    engines of other jobs leave for it.
    """
    for degree in job.need.degrees:
        if degree > most:
            return
        found = _only(draft, job, degree)
        if found is not None:
            seat(draft, job, found, repair if found.leave else why)
            return


def nowhere(draft: Draft, job: PlannedJob) -> bool:
    """Whether a job lacks an engine of several workers, and no host can be made to have room."""
    lacks = job.need.rolls_out and job.need.smallest > 1 and not draft.team(job.id).engines
    return lacks and _only(draft, job, job.need.smallest) is None


def shape(
    draft: Draft,
    job: PlannedJob,
    wanted: Sequence[int],
    *,
    helpers: int | None = None,
    why: Why | None = None,
    details: Mapping[str, Any] | None = None,
) -> bool:
    """Makes the job's engines be gangs of the `wanted` degrees, and its helpers so many (None: as
    they are); whether all is as wished. The rest is to be asked for again at a later look.

    Degrees that the job does not allow are left out, and one engine is there at least. Who is
    pinned stays, and counts as one of those wanted if it has such a degree. Workers come from
    engines of other degrees, helpers beyond `helpers`, and idle ones: the caller sees to the job's
    share. Each engine or helper that this makes is a move, with `details`.
    """
    why = why or Why("shape", job.id, {"degrees": list(wanted)})
    allowed = draft.needs[job.id].degrees
    degrees = sorted((d for d in wanted if d in allowed), reverse=True) or [job.need.smallest]
    kept, surplus, lacking = _matched(draft.team(job.id).engines, degrees)
    there = draft.team(job.id).helpers  # of those that may leave the last first
    over = 0 if helpers is None else max(0, len(there) - helpers)
    spare = [one for one in reversed(there) if not one.resident.pinned][:over]
    held = _held(draft, job, kept, surplus, spare, lacking)
    if held is not None:
        surplus.remove(held)
    unmet = False
    for degree in lacking:
        found = _found(draft, job, degree, surplus, spare)
        if found is None:
            unmet = True
        else:
            seat(draft, job, found, why, {**(details or {}), "to": f"rollout of {degree}"})
    if not unmet:
        here = draft.of.get(job.id, {})
        for seated in [one for one in (*surplus, *spare) if one.resident.id in here]:
            draft.remove(seated, why)
    if unmet or held is not None:
        return False
    if helpers is None:
        return True
    told = {"policy": why.rule, **(details or {}), "to": Role.TRAINING}
    while len(draft.team(job.id).helpers) < helpers:  # on idle workers
        worker = draft.free(lambda w: helps(draft, job.need, w))
        if not worker:
            return False
        made = way_back(draft, job.id, Role.ROLLOUT, told)
        draft.seat([worker], job.id, Role.TRAINING, why, move=made)
    return len(draft.team(job.id).helpers) == helpers


def _matched(
    engines: Sequence[Seated], degrees: Sequence[int]
) -> tuple[list[Seated], list[Seated], list[int]]:
    """Engines that stay and that may leave, and the degrees that nobody has yet."""
    kept: list[Seated] = []
    surplus: list[Seated] = []
    left = Counter(degrees)
    order = sorted(engines, key=lambda e: (not e.resident.pinned, not e.resident.settled))
    for engine in order:
        degree = len(engine.workers)
        fits = left[degree] > 0
        left[degree] -= int(fits)
        (kept if fits or engine.resident.pinned else surplus).append(engine)
    return kept, surplus, sorted(left.elements(), reverse=True)


def _held(
    draft: Draft,
    job: PlannedJob,
    kept: Sequence[Seated],
    surplus: Sequence[Seated],
    spare: Sequence[Seated],
    lacking: Sequence[int],
) -> Seated | None:
    """The engine that stays until another one serves: the smallest without which one that is
    lacking can be formed, or is on its way; None where none need stay, or none can.
    """
    serving = sorted((e for e in surplus if e.resident.settled), key=lambda e: len(e.workers))
    if not serving or any(engine.resident.settled for engine in kept):
        return None
    if kept:
        return serving[0]
    for engine in serving:
        others = [one for one in surplus if one is not engine]
        if any(_found(draft, job, degree, others, spare) for degree in lacking):
            return engine
    return None


def _found(
    draft: Draft, job: PlannedJob, degree: int, surplus: Sequence[Seated], spare: Sequence[Seated]
) -> GatheredWorkers | None:
    if degree == 1 and (worker := _alone(draft, job)):
        return GatheredWorkers((worker,))
    costs = {one.resident.id: SURPLUS for one in surplus}
    costs |= {one.resident.id: SPARE for one in spare}
    return gather(draft, job.need, degree, lambda one: costs.get(one.resident.id, NEVER))


def _only(draft: Draft, job: PlannedJob, degree: int) -> GatheredWorkers | None:
    """Where a job's only engine can be. Engines as large as it stay: two jobs would take each
    other's workers for ever.
    """
    if degree == 1:
        if worker := _alone(draft, job):
            return GatheredWorkers((worker,))
        helper = next(iter(draft.team(job.id).helpers), None)
        return GatheredWorkers(helper.workers, (helper,)) if helper is not None else None

    def cost(seated: Seated) -> int:
        resident = seated.resident
        if resident.core or resident.turns or resident.role == Role.SCORING:
            return NEVER
        if resident.job == job.id:
            return PINNED if resident.pinned else HELPER
        return NEVER if len(seated.workers) >= degree or resident.pinned else OTHERS

    return gather(draft, job.need, degree, cost)


def _alone(draft: Draft, job: PlannedJob) -> str:
    """An idle worker for an engine of its own; empty when there is none."""
    return draft.free(lambda worker: holds(draft, job.need, worker, 1))


def around(draft: Draft, job: PlannedJob, worker: str) -> GatheredWorkers | None:
    """An engine of the smallest degree that a worker, whose residents leave, is in: with idle
    workers of its host, and those of helpers of the job; None when there are too few.
    """
    degree, host = job.need.smallest, draft.workers[worker].host
    there = {one.resident.id: one for one in (*draft.on[worker].values(), *draft.beside(worker))}
    if any(one.resident.core or not one.awake for one in there.values()):
        return None
    helpers = [one for one in draft.team(job.id).helpers if not one.resident.pinned]
    near = [w for w in idle(draft, job.need, degree).get(host, []) if w != worker]
    lending = {
        one.workers[0]: one
        for one in helpers
        if draft.workers[one.workers[0]].host == host and one.resident.id not in there
    }
    others = [*near, *lending][: degree - 1]
    if len(others) < degree - 1 or not holds(draft, job.need, worker, degree):
        return None
    leave = [*there.values(), *(lending[name] for name in others if name in lending)]
    return GatheredWorkers(tuple(sorted([worker, *others], key=numbered)), tuple(leave))


def seat(
    draft: Draft,
    job: PlannedJob,
    found: GatheredWorkers,
    why: Why,
    details: dict[str, Any] | None = None,
    *,
    pinned: bool = False,
    op: str = "",
) -> None:
    """An engine where the workers are, whose residents leave; with `details` it is a move."""
    own = [one for one in found.leave if one.resident.job == job.id]
    for seated in found.leave:
        draft.remove(seated, why)
    made = _back(draft, job, found, own, why, details) if details is not None else None
    draft.seat(found.workers, job.id, Role.ROLLOUT, why, pinned=pinned, move=made, op=op)


def _back(
    draft: Draft,
    job: PlannedJob,
    found: GatheredWorkers,
    own: Sequence[Seated],
    why: Why,
    details: dict[str, Any],
) -> Callable[[str, str], Move]:
    """What makes the move of an engine, whose workers go back to what was there if all of it was
    the job's.
    """
    named = Counter(f"{one.resident.role} of {len(one.workers)}" for one in own)
    did = ", ".join(f"{n} {name}" for name, n in sorted(named.items())) or str(Role.IDLE)
    told = {"policy": why.rule, "from": did, **details}
    inside = [one for one in own if set(one.workers) <= set(found.workers)]
    ids = [one.resident.id for one in own]
    degrees = [len(one.workers) for one in inside]
    whole = sum(degrees) == len(found.workers)
    roles = {one.resident.role for one in inside}
    if whole and roles == {Role.TRAINING}:
        return way_back(draft, job.id, Role.TRAINING, told, leaves=ids)
    if not whole or roles != {Role.ROLLOUT}:
        degrees = [len(found.workers)]
    return way_back(draft, job.id, Role.ROLLOUT, told, degrees, leaves=ids)
