"""Rows of the pool as JSON documents: what Redis holds, and what decisions that are kept are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from meshrl.common.state.pool.placing.decisions import (
    Admit,
    Decision,
    FailJob,
    FinishMove,
    HostGone,
    Judge,
    Lose,
    Place,
    Serve,
)
from meshrl.common.state.pool.placing.snapshot import Move
from meshrl.common.state.pool.workers.rows import (
    Apart,
    Budget,
    Doing,
    Gang,
    Report,
    Resident,
    Role,
    Tier,
    WorkerRow,
)

RESIDENT, REPORT = "resident:", "report:"  # begin the names of fields of a gang's row
# What the planner wants of a resident, and what a worker says of itself, beside what needs a type.
WANTED = ("job", "role", "core", "tier", "turns", "pinned", "generation", "epoch")
ABOUT = ("host", "accelerator", "uuid", "market", "network")
# By which the script knows decisions that it does not know by the names of their classes.
KINDS: Mapping[type, str] = {HostGone: "host_gone", FailJob: "fail", FinishMove: "finish"}


def resident_document(resident: Resident) -> dict[str, Any]:
    """What is wanted of a resident; what is reported of it is others' to write."""
    apart = resident.apart.told() if resident.apart is not None else None
    wanted = {name: getattr(resident, name) for name in WANTED}
    return wanted | {"ranks": list(resident.ranks), "apart": apart}


def resident_of(id: str, row: Mapping[str, Any], reports: Mapping[int, Report]) -> Resident:
    """The resident that its gang's row describes."""
    typed: dict[str, Any] = {
        "role": Role(row["role"]),
        "ranks": tuple(row["ranks"]),
        "tier": Tier(row["tier"]),
        "apart": Apart.of(row.get("apart")),
    }
    return Resident(**{**row, **typed, "id": id, "reports": reports})


def report_document(report: Report) -> dict[str, Any]:
    """What a worker says of a resident on it, but for its rank, which names the field."""
    return {name: value for name, value in asdict(report).items() if name != "rank"}


def report_of(rank: int, row: Mapping[str, Any]) -> Report:
    """The report that a gang's row has of one rank."""
    typed = {"doing": Doing(row["doing"]), "tier": Tier(row["tier"])}
    return Report(**{**row, **typed, "rank": rank, "held": Budget(**row["held"])})


def worker_document(worker: WorkerRow) -> dict[str, Any]:
    """What a worker says of itself when it joins."""
    about = {name: getattr(worker, name) for name in ABOUT}
    return about | {"budget": asdict(worker.budget)}


def worker_of(row: Mapping[str, Any]) -> WorkerRow:
    """The worker of a row."""
    rest = {name: row[name] for name in ("id", "token", "gang", "membership", "revision")}
    typed = {"alive": row.get("alive", True), "budget": Budget(**row["about"]["budget"])}
    return WorkerRow(**{**row["about"], **rest, **typed})


def gang_of(row: Mapping[str, Any]) -> Gang:
    """The gang of a row, with its residents in the order in which they came."""
    wishes: dict[str, Mapping[str, Any]] = {}
    reports: dict[str, dict[int, Report]] = {}
    for field, value in row.items():
        if field.startswith(RESIDENT):
            wishes[field.removeprefix(RESIDENT)] = value
        elif field.startswith(REPORT):
            id, _, rank = field.removeprefix(REPORT).rpartition(":")
            reports.setdefault(id, {})[int(rank)] = report_of(int(rank), value)
    residents = (resident_of(id, wishes[id], reports.get(id, {})) for id in wishes)
    return Gang(
        id=row["id"],
        workers=tuple(row["workers"]),
        membership=row["membership"],
        residents=tuple(sorted(residents, key=lambda one: numbered(one.id))),
        formed_ms=row["formed_ms"],
        placed=row["placed"],
    )


def move_document(move: Move) -> dict[str, Any]:
    """A move under way, but for the id of the resident, which names the field."""
    return {name: value for name, value in asdict(move).items() if name != "id"}


def numbered(id: str) -> tuple[int, str]:
    """By what ids that end with a number rise: w2 before w10."""
    return len(id), id


def written(decision: Decision, index: int) -> dict[str, Any]:
    """The arguments of one decision, the `index`-th of its write. `extra` is what its event tells
    beside what the script knows better.
    """
    row = _arguments(decision)
    why = decision.why
    extra = why.inputs | ({"job": why.job} if why.job else {}) | row.pop("extra", {})
    return row | {"index": index, "rule": why.rule, "extra": json.dumps(extra)}


def _arguments(decision: Decision) -> dict[str, Any]:
    """A decision's own fields under its kind, but where the script acts by others."""
    made = type(decision)
    kind = {"kind": KINDS.get(made, made.__name__.lower())}
    match decision:
        case Place():
            return kind | _place(decision)
        case Lose(worker, why):
            reason = why.inputs.get("reason", "its worker is gone")
            return kind | {"worker": worker, "reason": reason}
        case Serve(host, services):
            names = list(services)
            return kind | {"host": host, "row": json.dumps(names), "extra": {"services": names}}
        case FinishMove(move, undone, details):
            row = {"id": move.id, "gang": move.gang, "started_ms": move.started_ms}
            return kind | row | {"undone": undone, "extra": details}
        case Judge(job, details):
            return kind | {"job": job, "extra": details}
    rest = {one.name: getattr(decision, one.name) for one in fields(decision)}
    del rest["why"]
    return kind | rest | ({"extra": {"job": rest["job"]}} if isinstance(decision, Admit) else {})


def _place(decision: Place) -> dict[str, Any]:
    resident, move = decision.resident, decision.move
    row = resident_document(resident)
    told = {key: row[key] for key in ("job", "role", "core", "tier", "generation", "epoch")}
    about = {"gang": decision.gang, "resident": resident.id, "pinned": resident.pinned}
    found = {
        "gang": decision.gang,
        "resident": resident.id,
        "ranks": list(resident.ranks),
        "generation": resident.generation,
        "epoch": resident.epoch,
        "row": json.dumps(row),
        "op": decision.op,
        "extra": told | about | {"reason": decision.why.rule},
    }
    return found | ({"move": json.dumps(move_document(move))} if move is not None else {})
