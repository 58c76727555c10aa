"""Rows of the pool as JSON documents: what Redis holds, and what decisions that are kept are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from common.state.pool.placing.snapshot import Move, PoolRequest
from common.state.pool.workers.rows import (
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


def resident_document(resident: Resident) -> dict[str, Any]:
    """What is wanted of a resident; what is reported of it is others' to write."""
    return {
        "job": resident.job,
        "role": resident.role,
        "core": resident.core,
        "ranks": list(resident.ranks),
        "tier": resident.tier,
        "turns": resident.turns,
        "pinned": resident.pinned,
        "apart": resident.apart.told() if resident.apart is not None else None,
        "generation": resident.generation,
        "epoch": resident.epoch,
    }


def resident_of(id: str, row: Mapping[str, Any], reports: Mapping[int, Report]) -> Resident:
    """The resident that its gang's row describes."""
    return Resident(
        id=id,
        job=row["job"],
        role=Role(row["role"]),
        core=row["core"],
        ranks=tuple(row["ranks"]),
        tier=Tier(row["tier"]),
        turns=row["turns"],
        pinned=row["pinned"],
        apart=Apart.of(row.get("apart")),
        generation=row["generation"],
        epoch=row["epoch"],
        changed_ms=row.get("changed_ms", 0),
        reports=reports,
    )


def report_document(report: Report) -> dict[str, Any]:
    """What a worker says of a resident on it, but for its rank, which names the field."""
    return {
        "generation": report.generation,
        "epoch": report.epoch,
        "token": report.token,
        "doing": report.doing,
        "tier": report.tier,
        "detail": report.detail,
        "held": asdict(report.held),
    }


def report_of(rank: int, row: Mapping[str, Any]) -> Report:
    """The report that a gang's row has of one rank."""
    return Report(
        rank,
        row["generation"],
        row["epoch"],
        row["token"],
        Doing(row["doing"]),
        Tier(row["tier"]),
        row["detail"],
        Budget(**row["held"]),
    )


def worker_document(worker: WorkerRow) -> dict[str, Any]:
    """What a worker says of itself when it joins."""
    return {
        "host": worker.host,
        "accelerator": worker.accelerator,
        "uuid": worker.uuid,
        "budget": asdict(worker.budget),
        "market": worker.market,
        "network": worker.network,
    }


def worker_of(row: Mapping[str, Any]) -> WorkerRow:
    """The worker of a row."""
    about = row["about"]
    return WorkerRow(
        id=row["id"],
        host=about["host"],
        accelerator=about["accelerator"],
        uuid=about["uuid"],
        token=row["token"],
        alive=row.get("alive", True),
        budget=Budget(**about["budget"]),
        market=about["market"],
        network=about["network"],
        gang=row["gang"],
        membership=row["membership"],
        revision=row["revision"],
    )


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
    return {
        "gang": move.gang,
        "started_ms": move.started_ms,
        "until_ms": move.until_ms,
        "back": move.back,
        "details": move.details,
    }


def move_of(id: str, row: Mapping[str, Any]) -> Move:
    """The move of a resident that is under way."""
    return Move(id, row["gang"], row["started_ms"], row["until_ms"], row["back"], row["details"])


def request_of(op: str, row: Mapping[str, Any]) -> PoolRequest:
    """What a person asked for under this operation."""
    return PoolRequest(
        op=op,
        kind=row["kind"],
        worker=row["worker"],
        role=row["role"],
        job=row["job"],
        host=row["host"],
        asked_ms=row["asked_ms"],
    )


def numbered(id: str) -> tuple[int, str]:
    """By what ids that end with a number rise: w2 before w10."""
    return len(id), id
