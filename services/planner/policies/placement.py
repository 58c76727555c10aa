"""The placement of a job's roles on the workers that are its share: what it gives back, the floor
that it needs, repairs, and what it grows by.

A core takes a worker for each of its ranks, an engine as many as its degree (`engines.py`), all of
one host; every other role takes one worker.
"""

from __future__ import annotations

from collections.abc import Set

from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import Why
from meshrl.common.state.pool.placing.fitting import room, takes
from meshrl.common.state.pool.workers.rows import Role, Tier
from meshrl.services.planner.policies import engines
from meshrl.services.planner.policies.cores import place_core
from meshrl.services.planner.policies.gathering import helps
from meshrl.services.planner.pool.draft import Draft


def give_back(draft: Draft, job: PlannedJob, share: int, rule: str, wakes: Set[str]) -> None:
    """Removes what a job has beyond its share: helpers first, then its last engines, but one; who
    is where a core `wakes` goes before others, which would lose that worker anyway, and what people
    have put there goes last.
    """
    why = _why(rule, job, share)
    team = draft.team(job.id)
    there = sorted(team.engines, key=lambda engine: not wakes.isdisjoint(engine.workers))
    most = share - _fixed(job)
    stays = next((engine for engine in there if len(engine.workers) <= most), None)
    others = [engine for engine in there if engine is not stays]
    spare = [*reversed(team.helpers), *reversed(others)]
    spare.sort(key=lambda s: (s.resident.pinned, wakes.isdisjoint(s.workers)))  # stable
    over = team.workers - share
    for seated in spare:
        if over > 0:
            draft.remove(seated, why)
            over -= len(seated.workers)


def place_floor(draft: Draft, job: PlannedJob, share: int, home: str, turns: bool) -> None:
    """The core, one engine and the frozen models: what a job cannot do without."""
    place_core(draft, job, share, home)
    _place_scoring(draft, job, share)
    if not job.need.rolls_out:
        return
    if share - _fixed(job) >= job.need.smallest:
        if not draft.team(job.id).engines:
            why, repair = _why("default", job, share), _why("repair", job, share)
            engines.place(draft, job, share - _fixed(job), why, repair)
    elif turns and job.need.alternates:
        _take_turns(draft, job, share)


def grow(draft: Draft, job: PlannedJob, share: int) -> None:
    """Idle workers train until as many do as the job's file says, the others roll out; those that
    are too few for an engine train, too, once all who join a new mesh are there.
    """
    team = draft.team(job.id)
    if team.core is None or not team.core.awake:
        return
    _conform(draft, job, share)
    why = _why("default", job, share)
    wanted = job.config.training - 1 - len(team.helpers) if job.need.helped else 0
    if _help(draft, job, min(wanted, share - draft.team(job.id).workers), why) < wanted:
        return
    left = share - draft.team(job.id).workers
    left -= engines.grow(draft, job, left, why)
    if job.need.smallest > 1 and not draft.snapshot.gathers:
        _help(draft, job, left, why)


def _help(draft: Draft, job: PlannedJob, most: int, why: Why) -> int:
    """Helpers on idle workers, at most so many; how many there are then, `most` if none is
    wanted.
    """
    if not job.need.helped or most <= 0:
        return most
    for found in range(most):
        worker = draft.free(lambda w: helps(draft, job.need, w))
        if not worker:
            return found
        draft.seat([worker], job.id, Role.TRAINING, why)
    return most


def _conform(draft: Draft, job: PlannedJob, share: int) -> None:
    """Engines of degrees that the job allows no more become others."""
    team, allowed = draft.team(job.id), draft.needs[job.id].degrees
    there = [len(engine.workers) for engine in team.engines if not engine.resident.pinned]
    if set(there) <= set(allowed):
        return
    right = [degree for degree in there if degree in allowed]
    room = share - _fixed(job) - len(team.helpers) - sum(right)
    wanted = right + [job.need.smallest] * (room // job.need.smallest)
    engines.shape(draft, job, wanted, why=_why("default", job, share))


def end_turns(draft: Draft, job: PlannedJob, share: int) -> None:
    """Engines that take turns with the core leave when one with a worker of its own is ready."""
    team = draft.team(job.id)
    ready = any(engine.resident.settled for engine in team.engines)
    if team.core is None or not ready or share - _fixed(job) < job.need.smallest:
        return
    why = Why("share", job.id, {"entitled": share})
    for engine in team.turning:
        draft.remove(engine, why)
    if team.core.resident.turns:
        draft.change(team.core, why, turns=False)


def _fixed(job: PlannedJob) -> int:
    """Workers of the core and the frozen models."""
    return job.need.ranks + int(job.need.scoring)


def _why(rule: str, job: PlannedJob, share: int) -> Why:
    return Why(rule, job.id, {"entitled": share})


def _place_scoring(draft: Draft, job: PlannedJob, share: int) -> None:
    """Frozen models go to an idle worker, or to one that is missed least."""
    team = draft.team(job.id)
    if not job.need.scoring or team.scoring is not None:
        return
    why, worker = _why("default", job, share), draft.free()
    if not worker:
        movable = [e for e in team.engines if not e.resident.pinned]
        spares = [h for h in team.helpers if not h.resident.pinned]
        spares = spares or (movable if len(team.engines) > 1 else [])
        if not spares:
            return
        spare = spares[-1]
        why = _why("repair", job, share)
        draft.remove(spare, why)
        worker = spare.workers[0]
    draft.seat([worker], job.id, Role.SCORING, why)


def _take_turns(draft: Draft, job: PlannedJob, share: int) -> None:
    """An engine on each worker of the core, which computes by turns with it."""
    why = _why("turns", job, share)
    team = draft.team(job.id)
    core = team.core
    if core is None or not core.awake or team.engines or team.turning:
        return
    need = takes(Role.TRAINING, True, len(core.workers), job.need)
    need += takes(Role.ROLLOUT, False, 1, job.need)
    if not all(room(draft.workers[w].budget, Tier.ACCELERATOR, 0, need) for w in core.workers):
        return
    if not core.resident.turns:
        core = draft.change(core, why, turns=True)
    for worker in core.workers:
        draft.seat([worker], job.id, Role.ROLLOUT, why, turns=True)
