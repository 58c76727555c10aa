"""The rows of gangs: the state that the leader desires, and the actual one that workers report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from common.state.client import State
from common.state.keys import MESH, PLANNER

GANGS = f"{MESH}:gangs"
GANG = f"{MESH}:gang:"
MOVES = f"{MESH}:moves"
MOVING = f"{MESH}:moving"


class Role(StrEnum):
    """What a gang does."""

    IDLE = "idle"
    ROLLOUT = "rollout"
    TRAINING = "training"
    SCORING = "scoring"  # it hosts the job's frozen models


@dataclass(frozen=True)
class Gang:
    """The row of a gang. `epoch` counts decisions; the actual state counts only for the decision
    `actual_epoch`.
    """

    id: str
    workers: list[str]  # in the order of their ranks
    accelerator: str
    desired_role: Role
    desired_job: str
    desired_core: bool  # in a training role: owns parameters and optimizer
    epoch: int
    actual_role: Role
    actual_state: str  # idle | starting | ready | draining | failed | lost
    actual_epoch: int
    changed_ms: int
    pinned: bool  # moved by hand: the policy leaves it alone
    detail: str = ""
    size: int = 1  # workers that it is made of

    @property
    def whole(self) -> bool:
        """Whether all its workers have joined."""
        return len(self.workers) >= self.size

    @property
    def settled(self) -> bool:
        """Whether the gang does what was decided last."""
        done = "idle" if self.desired_role == Role.IDLE else "ready"
        return self.actual_epoch == self.epoch and self.actual_state == done


@dataclass(frozen=True)
class MoveRequest:
    """What a person asked for with `meshrl move`."""

    gang: str
    role: str  # as that person wrote it
    op_id: str


@dataclass(frozen=True)
class GangMove:
    """A move that a leader has decided and that is not complete yet."""

    gang: str
    epoch: int  # number of the decision
    started_ms: int
    details: dict[str, Any]  # as they were given to `set_desired`


async def join_gang(
    state: State, gang: str, worker: str, token: int, accelerator: str, size: int = 1
) -> Gang:
    """Creates the record of a gang of `size` workers or takes it up again; Fenced without the
    worker's lease.

    A new start of the worker (another token) is `idle` whatever the record said. Workers of a gang
    that had another size are no longer part of it.
    """
    args = {
        "gang": gang,
        "worker": worker,
        "token": token,
        "accelerator": accelerator,
        "size": size,
    }
    return _gang((await state.run("join_gang", [MESH], args))["row"])


async def set_desired(
    state: State,
    leader_token: int,
    gang: str,
    role: Role,
    job: str,
    core: bool,
    reason: str,
    op_id: str,
    pinned: bool = False,
    details: dict[str, Any] | None = None,
) -> int:
    """Writes what the gang should do and returns the new epoch; Fenced for a leader that is no
    longer one.

    `details` (stage times, thresholds) are those of a move: they become fields of the event
    `desired`, and the move is under way until `finish_move` or the next decision about the gang.
    Moves that asked for this are settled.
    """
    args = {
        "election": PLANNER,
        "token": leader_token,
        "gang": gang,
        "role": role,
        "job": job,
        "core": _flag(core),
        "pinned": _flag(pinned),
        "reason": reason,
        "op": op_id,
        "details": json.dumps(details or {}),
    }
    return int((await state.run("desired", [MESH], args))["epoch"])


async def report_actual(
    state: State,
    gang: str,
    worker_token: int,
    epoch: int,
    role: Role,
    status: str,
    detail: str = "",
) -> bool:
    """Records what a worker does under `epoch`; False when the leader has decided anew since. The
    gang does what the worker does that is furthest from done.

    Fenced when `worker_token` is not the live lease of one of the gang's workers.
    """
    args = {
        "gang": gang,
        "token": worker_token,
        "epoch": epoch,
        "role": role,
        "status": status,
        "detail": detail,
    }
    return bool((await state.run("actual", [MESH], args))["accepted"])


async def gangs(state: State) -> list[Gang]:
    """All gangs by their names, g2 before g10: workers that start together join in any order."""
    rows = (await state.run("rows", [MESH], {"index": GANGS, "prefix": GANG}))["rows"]
    return sorted(map(_gang, rows or []), key=lambda gang: (len(gang.id), gang.id))


async def gang(state: State, id: str) -> Gang | None:
    """One gang; None when there is none of that id."""
    row = (await state.run("row", [f"{GANG}{id}"], {}))["row"]
    return _gang(row | {"id": id}) if row else None


async def lose_gang(state: State, leader_token: int, gang: str, reason: str) -> None:
    """Marks a gang whose worker has gone `lost`; the worker's next start joins it again."""
    args = {"election": PLANNER, "token": leader_token, "gang": gang, "reason": reason}
    await state.run("gang_lost", [MESH], args)


async def request_move(state: State, gang: str, role: str, op_id: str) -> None:
    """Asks the leader to give a gang another role; it stays on record until `set_desired` or
    `decline_move`.
    """
    await state.run("request_move", [MESH], {"gang": gang, "role": role, "op": op_id})


async def moves_asked_for(state: State) -> list[MoveRequest]:
    """The moves on record, in the order in which they were asked for."""
    row = (await state.run("row", [MOVES], {}))["row"] or {}
    moves = [json.loads(move) | {"op": op} for op, move in row.items()]
    moves.sort(key=lambda move: (move["asked_ms"], move["op"]))
    return [MoveRequest(move["gang"], move["role"], move["op"]) for move in moves]


async def decline_move(state: State, leader_token: int, op_id: str, reason: str) -> None:
    """Strikes a move off the record, with the reason in the event `move_declined`."""
    args = {"election": PLANNER, "token": leader_token, "move": op_id, "reason": reason}
    await state.run("decline_move", [MESH], args)


async def moves_under_way(state: State) -> list[GangMove]:
    """The moves that are under way, one of a gang at most, by gang."""
    row = (await state.run("row", [MOVING], {}))["row"] or {}
    found = {gang: json.loads(move) for gang, move in row.items()}
    return [
        GangMove(gang, move["epoch"], move["started_ms"], json.loads(move["details"]))
        for gang, move in sorted(found.items())
    ]


async def finish_move(
    state: State, leader_token: int, move: GangMove, details: dict[str, Any]
) -> None:
    """Strikes a complete move off the record and tells of it, with `details`, in the event `move`,
    once. Nothing happens when the gang was decided about anew.
    """
    about = {"gang": move.gang, "epoch": move.epoch, "started_ms": move.started_ms}
    args = {
        "election": PLANNER,
        "token": leader_token,
        "gang": move.gang,
        "epoch": move.epoch,
        "details": json.dumps(details | about),
    }
    await state.run("finish_move", [MESH], args)


def _flag(value: bool) -> str:
    return "1" if value else "0"


def _gang(row: dict[str, str]) -> Gang:
    return Gang(
        id=row["id"],
        workers=sorted(
            (key.removeprefix("worker:") for key in row if key.startswith("worker:")),
            key=lambda worker: (len(worker), worker),
        ),
        accelerator=row["accelerator"],
        desired_role=Role(row["desired_role"]),
        desired_job=row["desired_job"],
        desired_core=row["desired_core"] == "1",
        epoch=int(row["epoch"]),
        actual_role=Role(row["actual_role"]),
        actual_state=row["actual_state"],
        actual_epoch=int(row["actual_epoch"]),
        changed_ms=int(row["changed_ms"]),
        pinned=row["pinned"] == "1",
        detail=row["detail"],
        size=int(row.get("size", 1)),
    )
