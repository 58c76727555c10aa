"""Decides on the moves that people ask for."""

from __future__ import annotations

from common.state.gangs import Gang, MoveRequest, Role
from services.planner.placement import RoleDecision

ROLES = (Role.ROLLOUT, Role.TRAINING, Role.IDLE)  # roles that a gang may be given by hand


def refusal(move: MoveRequest, gang: Gang | None) -> str:
    """Why a requested move is declined; empty when it is made. `gang` is the one it names, if there
    is one.
    """
    if gang is None:
        return f"no gang is called {move.gang}"
    if move.role not in ROLES:
        return f"{move.role} is no role; choose from {', '.join(ROLES)}"
    if gang.desired_core:
        return f"{gang.id} is the core of training; move another one"
    if gang.desired_role == Role.SCORING:
        return f"{gang.id} hosts the job's frozen models; move another one"
    if gang.size > 1:
        return f"{gang.id} is a gang of {gang.size} workers, for a core of so many ranks"
    return ""


def granted(move: MoveRequest, gang: Gang) -> RoleDecision:
    """The decision that makes the move that was asked for."""
    details = {"policy": "user", "from": gang.desired_role, "to": move.role}
    return RoleDecision(gang.id, Role(move.role), False, "user", details)
