"""Which gang does what: the default split, repairs, and the gang that a move takes.

Pure: from gangs as they are to the next decision, one at a time, so that each is made on what the
last one left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.state.gangs import Gang

TRAINING, ROLLOUT, IDLE = "training", "rollout", "idle"


@dataclass(frozen=True, slots=True)
class Decision:
    gang: str
    role: str
    core: bool
    policy: str  # default | repair | stage_time | user | release


def next_decision(gangs: Sequence[Gang], job: str, training: int) -> Decision | None:
    """What must be put right before anything is improved; None: every gang has its place.

    Without a job every gang is idle. A job has exactly one core; a job without any takes the first
    hybrid, else the first gang. Idle gangs train until `training` do, the others roll out.
    """
    usable = [g for g in gangs if g.actual_state != "lost"]
    if not job:
        busy = next((g for g in usable if g.desired_role != IDLE), None)
        return Decision(busy.id, IDLE, False, "release") if busy else None
    foreign = next((g for g in usable if g.desired_role != IDLE and g.desired_job != job), None)
    if foreign is not None:
        return Decision(foreign.id, IDLE, False, "release")
    trains = [g for g in usable if g.desired_role == TRAINING]
    cores = [g for g in trains if g.desired_core]
    if not cores and usable:
        begun = any(g.desired_core for g in gangs)
        chosen = (trains or usable)[0]
        return Decision(chosen.id, TRAINING, True, "repair" if begun else "default")
    if len(cores) > 1:  # one that was lost has come back: another leads since
        leads = next((g for g in cores if g.settled), cores[0])
        spare_core = next(g for g in cores if g.id != leads.id)
        return Decision(spare_core.id, TRAINING, False, "repair")
    idle = next((g for g in usable if g.desired_role == IDLE and not g.pinned), None)
    if idle is not None:
        role = TRAINING if len(trains) < training else ROLLOUT
        return Decision(idle.id, role, False, "default")
    if not any(g.desired_role == ROLLOUT for g in usable):
        spare = next((g for g in trains if not g.desired_core), None)
        return Decision(spare.id, ROLLOUT, False, "repair") if spare else None
    return None


def gang_to_move(gangs: Sequence[Gang], grows: str) -> Gang | None:
    """The gang that joins the role that grows: the last serving the other one and is no core."""
    other = ROLLOUT if grows == TRAINING else TRAINING
    candidates = [
        g
        for g in gangs
        if g.desired_role == other and not g.desired_core and not g.pinned and g.settled
    ]
    return candidates[-1] if candidates else None
