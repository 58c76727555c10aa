"""The placement of a job's roles on the workers that are its share: what it gives back, the floor
that it needs, repairs, and what it grows by.

A core takes a worker for each of its ranks, all of one host; every other role takes one worker.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from common.pool.budgets import room, takes
from common.pool.decisions import Why
from common.pool.needs import PlannedJob
from common.pool.rows import Role, Tier
from services.planner.draft import Draft
from services.planner.policies.cores import place_core
from services.planner.team import Seated


def give_back(draft: Draft, job: PlannedJob, share: int, rule: str, wakes: Set[str]) -> None:
    """Removes what a job has beyond its share: helpers first, then its last engines, but one; who
    is where a core `wakes` goes before others, which would lose that worker anyway, and what people
    have put there goes last.
    """
    why = _why(rule, job, share)
    team = draft.team(job.id)
    engines = sorted(team.engines, key=lambda engine: not wakes.isdisjoint(engine.workers))
    engines = engines[1:] if share > _fixed(job) else engines
    spare = [*reversed(team.helpers), *reversed(engines)]
    spare.sort(key=lambda s: (s.resident.pinned, wakes.isdisjoint(s.workers)))  # stable
    for seated in spare[: max(0, team.workers - share)]:
        draft.remove(seated, why)


def place_floor(draft: Draft, job: PlannedJob, share: int, home: str, turns: bool) -> None:
    """The core, one engine and the frozen models: what a job cannot do without."""
    place_core(draft, job, share, home)
    _place_scoring(draft, job, share)
    if not job.need.rolls_out:
        return
    if share > _fixed(job):
        _place_engine(draft, job, share)
    elif turns and job.need.alternates:
        _take_turns(draft, job, share)


def grow(draft: Draft, job: PlannedJob, share: int) -> None:
    """Idle workers train until as many do as the job's file says, the others roll out."""
    team = draft.team(job.id)
    if team.core is None or not team.core.awake:
        return
    trains, have = 1 + len(team.helpers), team.workers
    while have < share:
        helps = job.need.helped and trains < job.config.training
        role = Role.TRAINING if helps else Role.ROLLOUT
        worker = draft.free(lambda w, role=role: fits(draft, job, w, role))  # type: ignore[misc]
        if not worker:
            return
        draft.seat([worker], job.id, role, Why("default", job.id, {"entitled": share}))
        trains, have = trains + (role == Role.TRAINING), have + 1


def end_turns(draft: Draft, job: PlannedJob, share: int) -> None:
    """Engines that take turns with the core leave when one with a worker of its own is ready."""
    team = draft.team(job.id)
    ready = any(engine.resident.settled for engine in team.engines)
    if team.core is None or not ready or share <= _fixed(job):
        return
    why = Why("share", job.id, {"entitled": share})
    for engine in team.turning:
        draft.remove(engine, why)
    if team.core.resident.turns:
        draft.change(team.core, why, turns=False)


def fits(draft: Draft, job: PlannedJob, worker: str, role: Role) -> bool:
    """Whether a worker's accelerator has what the role takes."""
    need = takes(role, False, 1, job.need)
    return room(draft.workers[worker].budget, Tier.ACCELERATOR, 0, need)


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
        engines = [e for e in team.engines if not e.resident.pinned]
        spare = _last([h for h in team.helpers if not h.resident.pinned])
        spare = spare or (_last(engines) if len(team.engines) > 1 else None)
        if spare is None:
            return
        why = _why("repair", job, share)
        draft.remove(spare, why)
        worker = spare.workers[0]
    draft.seat([worker], job.id, Role.SCORING, why)


def _place_engine(draft: Draft, job: PlannedJob, share: int) -> None:
    """One engine at least: on an idle worker, or on that of a helper."""
    team = draft.team(job.id)
    if team.engines:
        return
    why = _why("default", job, share)
    worker = draft.free(lambda w: fits(draft, job, w, Role.ROLLOUT))
    if not worker:
        spare = next(iter(team.helpers), None)
        if spare is None:
            return
        why = _why("repair", job, share)
        draft.remove(spare, why)
        worker = spare.workers[0]
    draft.seat([worker], job.id, Role.ROLLOUT, why)


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


def _last(seats: Sequence[Seated]) -> Seated | None:
    return seats[-1] if seats else None
