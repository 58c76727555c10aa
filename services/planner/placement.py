"""The placement policy: the default split of gangs over roles, repairs, and the gang that a move
takes.

The core of training takes a gang of as many workers as the job has ranks, and all of them; every
other role takes gangs of one worker.

Pure: from gangs as they are to the next decision, one at a time, so that each is made on what the
last one left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.state.gangs import Gang, Role


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """A role for a gang, and the policy that gives it."""

    gang: str
    role: Role
    core: bool
    policy: str  # default | repair | stage_time | user | release
    details: dict[str, Any] = field(default_factory=dict)  # a move: the figures that decided it


def next_decision(
    gangs: Sequence[Gang], job: str, training: int, scoring: bool = False, ranks: int = 1
) -> RoleDecision | None:
    """What must be put right before anything is improved; None: every gang has its place.

    Without a job every gang is idle. A job has exactly one core, of `ranks` workers; `_able` says
    which gang becomes it. Idle gangs train until `training` do, the others roll out. One that has
    frozen models (`scoring`) has exactly one gang for them, taken from what is idle or spare.
    """
    usable = [g for g in gangs if g.actual_state != "lost" and g.whole]
    if not job:
        busy = next((g for g in usable if g.desired_role != Role.IDLE), None)
        return RoleDecision(busy.id, Role.IDLE, False, "release") if busy else None
    foreign = next(
        (g for g in usable if g.desired_role != Role.IDLE and g.desired_job != job), None
    )
    if foreign is not None:
        return RoleDecision(foreign.id, Role.IDLE, False, "release")
    unfit = next((g for g in usable if g.desired_role != Role.IDLE and not _fits(g, ranks)), None)
    if unfit is not None:
        return RoleDecision(unfit.id, Role.IDLE, False, "release")
    trains = [g for g in usable if g.desired_role == Role.TRAINING]
    cores = [g for g in trains if g.desired_core]
    if not cores and (able := _able(usable, ranks)) is not None:
        begun = any(g.desired_core for g in gangs)
        return RoleDecision(able.id, Role.TRAINING, True, "repair" if begun else "default")
    if len(cores) > 1:  # one that was lost has come back: another leads since
        leads = next((g for g in cores if g.settled), cores[0])
        spare_core = next(g for g in cores if g.id != leads.id)
        role = Role.TRAINING if spare_core.size == 1 else Role.IDLE
        return RoleDecision(spare_core.id, role, False, "repair")
    alone = [g for g in usable if g.size == 1]
    decision = _scoring(alone, trains, scoring)
    if decision is not None:
        return decision
    idle = next((g for g in alone if g.desired_role == Role.IDLE and not g.pinned), None)
    if idle is not None:
        role = Role.TRAINING if len(trains) < training else Role.ROLLOUT
        return RoleDecision(idle.id, role, False, "default")
    if not any(g.desired_role == Role.ROLLOUT for g in usable):
        spare = next((g for g in trains if not g.desired_core), None)
        return RoleDecision(spare.id, Role.ROLLOUT, False, "repair") if spare else None
    return None


def shortage(gangs: Sequence[Gang], ranks: int, rolls_out: bool, scoring: bool) -> str:
    """Why a job can never run on these gangs, and what to do; empty when they are enough."""
    if gangs and not any(g.size == ranks for g in gangs):
        sizes = " or ".join(map(str, sorted({g.size for g in gangs})))
        return (
            f"the job trains with ranks = {ranks}, and gangs of this mesh have {sizes} workers: "
            f"start it with `meshrl up --ranks {ranks}`, or set training.ranks"
        )
    roles = {"training": ranks == 1, "rollout": rolls_out, "its frozen models": scoring}
    needed = [role for role, wanted in roles.items() if wanted]
    alone = sum(g.size == 1 for g in gangs)
    if alone >= len(needed):
        return ""
    core = f" --ranks {ranks}" if ranks > 1 else ""
    workers = len(needed) + (ranks if ranks > 1 else 0)
    beside = f", beside the {ranks} of its core" if ranks > 1 else ""
    return (
        f"the job needs a worker each for {', '.join(needed)}{beside}, and this mesh has {alone}: "
        f"start one with `meshrl up --workers {workers}{core}`, or, when workers of this one were "
        "lost, go on with `meshrl resume RUN`"
    )


def _able(usable: Sequence[Gang], ranks: int) -> Gang | None:
    """The gang that becomes the core: a hybrid, which has the model already, or else the one whose
    work is missed least. The only one that rolls out is taken when there is no other at all.
    """
    rolls_out = sum(g.desired_role == Role.ROLLOUT for g in usable)
    order = {
        Role.TRAINING: 0,
        Role.IDLE: 1,
        Role.ROLLOUT: 2 if rolls_out > 1 else 4,
        Role.SCORING: 3,
    }
    fit = [g for g in usable if g.size == ranks]
    return min(fit, key=lambda g: order[g.desired_role], default=None)


def _fits(gang: Gang, ranks: int) -> bool:
    """Whether a gang is as large as its role takes."""
    return gang.size == (ranks if gang.desired_core else 1)


def _scoring(usable: Sequence[Gang], trains: Sequence[Gang], wanted: bool) -> RoleDecision | None:
    """The gang that hosts the frozen models, or stops hosting them because another one does."""
    hosts = [g for g in usable if g.desired_role == Role.SCORING]
    stays = next((g for g in hosts if g.settled), hosts[0]) if hosts and wanted else None
    leaves = next((g for g in hosts if g is not stays), None)  # one that was lost has come back
    if leaves is not None:
        return RoleDecision(leaves.id, Role.IDLE, False, "release")
    if stays is not None or not wanted:
        return None
    idle = next((g for g in usable if g.desired_role == Role.IDLE and not g.pinned), None)
    if idle is not None:
        return RoleDecision(idle.id, Role.SCORING, False, "default")
    hybrids = [g for g in trains if not g.desired_core and not g.pinned]
    engines = [g for g in usable if g.desired_role == Role.ROLLOUT and not g.pinned]
    rolls_out = sum(g.desired_role == Role.ROLLOUT for g in usable)
    spare = hybrids + (engines if rolls_out > 1 else [])
    return RoleDecision(spare[-1].id, Role.SCORING, False, "repair") if spare else None


def gang_to_move(gangs: Sequence[Gang], grows: str) -> Gang | None:
    """The gang that joins the role that grows: the last serving the other one and is no core."""
    other = Role.ROLLOUT if grows == Role.TRAINING else Role.TRAINING
    candidates = [
        g
        for g in gangs
        if g.desired_role == other
        and g.size == 1
        and not g.desired_core
        and not g.pinned
        and g.settled
    ]
    return candidates[-1] if candidates else None
