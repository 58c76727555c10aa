"""Decides on the move that the stage times of a job ask for, within its workers."""

from __future__ import annotations

from typing import Any

from common.pool.decisions import Why
from common.pool.needs import PlannedJob
from common.pool.rows import Role
from services.planner.draft import Draft
from services.planner.policies.allocation import Split, growing_role
from services.planner.policies.engines import degrees_of, shape
from services.planner.policies.moves import move
from services.planner.policies.settling import StageWatch, look
from services.planner.team import Seated, Team


def balance(draft: Draft, job: PlannedJob, watch: StageWatch) -> StageWatch:
    """Moves the last engine or helper to the other side if the stage times say so; what is to be
    remembered of them.
    """
    team = draft.team(job.id)
    if not job.need.helped:
        _dismiss(draft, job, team)
        return watch
    if not job.config.moves:
        return watch
    settled = team.core is not None and team.core.awake and team.settled
    watch, times = look(watch, job, settled, draft.snapshot.now_ms)
    if times is None:
        return watch
    helping = len(team.helpers) // job.need.smallest  # as many as would be an engine count as one
    split = Split(rollout=len(team.engines), training=1 + helping)
    grows = growing_role(times, split, job.config)
    seated = _moves(team, grows) if grows is not None else None
    if grows is None or seated is None:
        return watch
    figures = {
        "rollout_s": times.rollout_s,
        "train_s": times.train_s,
        "threshold": job.config.imbalance,
        "step": job.steps_done,
    }
    details = {"policy": "stage_time", "from": seated.resident.role, "to": grows, **figures}
    why = Why("stage_time", job.id, figures)
    if job.need.degrees == (1,):
        move(draft, seated, grows, why, details)
    else:
        _reshape(draft, job, seated, why, details)
    return watch.moved(job.steps_done)


def _dismiss(draft: Draft, job: PlannedJob, team: Team) -> None:
    """Helpers that the core takes nothing of roll out, but those that a person has put there."""
    for seated in [one for one in team.helpers if not one.resident.pinned]:
        why = Why("unhelped", job.id)
        draft.remove(seated, why)
        draft.seat(seated.workers, job.id, Role.ROLLOUT, why)


def _reshape(
    draft: Draft, job: PlannedJob, seated: Seated, why: Why, details: dict[str, Any]
) -> None:
    """The workers of an engine become helpers, or helpers a further engine."""
    team = draft.team(job.id)
    degrees, helpers = degrees_of(team.engines), len(team.helpers)
    if seated.resident.role == Role.ROLLOUT:
        degrees.remove(len(seated.workers))
        helpers += len(seated.workers)
    elif helpers >= job.need.smallest:
        degrees.append(job.need.smallest)
        helpers -= job.need.smallest
    shape(draft, job, degrees, helpers=helpers, why=why, details=details)


def _moves(team: Team, grows: Role) -> Seated | None:
    others = team.engines if grows == Role.TRAINING else team.helpers
    return next((seated for seated in reversed(others) if not seated.resident.pinned), None)
