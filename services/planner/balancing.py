"""Decides on the move that the stage times of a job ask for."""

from __future__ import annotations

from collections.abc import Sequence

from common.state.gangs import Gang, Role
from services.planner.allocation import Split, StageTimes, growing_role
from services.planner.job import PlannedJob
from services.planner.moves import progress
from services.planner.placement import RoleDecision, gang_to_move
from services.planner.presence import usable
from services.planner.stages import Published


def rebalance(
    times: StageTimes, job: PlannedJob, gangs: Sequence[Gang], entries: Sequence[Published]
) -> RoleDecision | None:
    """The gang that changes sides, with the figures of that decision; None: the split is kept.
    `entries` are those of live processes.
    """
    there = usable(gangs)
    split = Split(
        rollout=sum(g.desired_role == Role.ROLLOUT for g in there),
        training=sum(g.desired_role == Role.TRAINING for g in there),
    )
    grows = growing_role(times, split, job.config)
    gang = gang_to_move(there, grows) if grows else None
    if grows is None or gang is None:
        return None
    details = {
        "policy": "stage_time",
        "from": gang.desired_role,
        "to": grows,
        "rollout_s": times.rollout_s,
        "train_s": times.train_s,
        "threshold": job.config.imbalance,
        "step": job.steps_done,
        "before": progress(gangs, entries, gang.id),
    }
    return RoleDecision(gang.id, grows, False, "stage_time", details)
