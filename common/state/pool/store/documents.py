"""JSON documents of pool rows and decisions, as Redis holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from meshrl.common.state.pool.scheduling.decisions import (
    AssignServices,
    Decision,
    DissolveGang,
    FailJob,
    FinishMove,
    FormGang,
    MarkWorkerLost,
    PlaceInstance,
    RejectRequest,
    RemoveInstance,
    ReportHostPresence,
    ReportMoveOutcome,
    SetBlockReason,
    SetSeeding,
)
from meshrl.common.state.pool.scheduling.snapshot import Move
from meshrl.common.state.pool.workers.rows import (
    ExpertSplit,
    Gang,
    Instance,
    InstancePhase,
    InstanceReport,
    Role,
    Tier,
    TierBytes,
    WorkerRow,
    check_price,
)

INSTANCE_PREFIX, REPORT_PREFIX = "instance:", "report:"  # of field names of a gang's row
# Untyped fields of an instance's desired state, and of a worker's registration.
DESIRED_FIELDS = ("job", "role", "core", "tier", "time_sliced", "pinned", "generation", "epoch")
WORKER_FIELDS = ("host", "accelerator", "uuid", "market", "price", "network", "copy_rates")
# Names of decisions in the script.
DECISION_KINDS: Mapping[type, str] = {
    FormGang: "form_gang",
    DissolveGang: "dissolve_gang",
    PlaceInstance: "place_instance",
    RemoveInstance: "remove_instance",
    MarkWorkerLost: "mark_worker_lost",
    ReportHostPresence: "report_host_presence",
    SetBlockReason: "set_block_reason",
    SetSeeding: "set_seeding",
    FailJob: "fail_job",
    AssignServices: "assign_services",
    FinishMove: "finish_move",
    RejectRequest: "reject_request",
    ReportMoveOutcome: "report_move_outcome",
}


def encode_instance(instance: Instance) -> dict[str, Any]:
    """Return the desired state of an instance; workers write its reports."""
    split = instance.expert_split.to_list() if instance.expert_split is not None else None
    desired = {name: getattr(instance, name) for name in DESIRED_FIELDS}
    return desired | {"ranks": list(instance.ranks), "expert_split": split}


def decode_instance(
    id: str, row: Mapping[str, Any], reports: Mapping[int, InstanceReport]
) -> Instance:
    """Return the instance that its gang's row describes."""
    typed: dict[str, Any] = {
        "role": Role(row["role"]),
        "ranks": tuple(row["ranks"]),
        "tier": Tier(row["tier"]),
        "expert_split": ExpertSplit.from_list(row.get("expert_split")),
    }
    return Instance(**{**row, **typed, "id": id, "reports": reports})


def encode_report(report: InstanceReport) -> dict[str, Any]:
    """Return a report's fields without its rank, which names the field."""
    return {name: value for name, value in asdict(report).items() if name != "rank"}


def decode_report(rank: int, row: Mapping[str, Any]) -> InstanceReport:
    """Return the report of one rank in a gang's row."""
    typed = {"phase": InstancePhase(row["phase"]), "tier": Tier(row["tier"])}
    return InstanceReport(**{**row, **typed, "rank": rank, "usage": TierBytes(**row["usage"])})


def encode_worker(worker: WorkerRow) -> dict[str, Any]:
    """Return the fields that a worker publishes when it joins; ConfigError for an invalid price."""
    check_price(worker.price)
    details = {name: getattr(worker, name) for name in WORKER_FIELDS}
    return details | {"budget": asdict(worker.budget)}


def decode_worker(row: Mapping[str, Any]) -> WorkerRow:
    """Return the worker of a row."""
    rest = {name: row[name] for name in ("id", "token", "gang", "membership", "revision")}
    typed = {"alive": row.get("alive", True), "budget": TierBytes(**row["details"]["budget"])}
    typed["preempt_at_s"] = row.get("preempt_at_s")
    return WorkerRow(**{**row["details"], **rest, **typed})


def decode_gang(row: Mapping[str, Any]) -> Gang:
    """Return the gang of a row, with its instances in the order of their arrival."""
    desired: dict[str, Mapping[str, Any]] = {}
    reports: dict[str, dict[int, InstanceReport]] = {}
    for field, value in row.items():
        if field.startswith(INSTANCE_PREFIX):
            desired[field.removeprefix(INSTANCE_PREFIX)] = value
        elif field.startswith(REPORT_PREFIX):
            id, _, rank = field.removeprefix(REPORT_PREFIX).rpartition(":")
            reports.setdefault(id, {})[int(rank)] = decode_report(int(rank), value)
    instances = (decode_instance(id, desired[id], reports.get(id, {})) for id in desired)
    return Gang(
        id=row["id"],
        workers=tuple(row["workers"]),
        membership=row["membership"],
        instances=tuple(sorted(instances, key=lambda one: id_sort_key(one.id))),
        formed_ms=row["formed_ms"],
        next_instance=row["next_instance"],
    )


def encode_move(move: Move) -> dict[str, Any]:
    """Return a move's fields without the instance's id, which names the field."""
    return {name: value for name, value in asdict(move).items() if name != "id"}


def id_sort_key(id: str) -> tuple[int, str]:
    """Return a sort key for ids that end with a number: w2 before w10."""
    return len(id), id


def encode_decision(decision: Decision, index: int) -> dict[str, Any]:
    """Return the arguments of one decision, the `index`-th of its write.

    `extra` is what its event contains beside the fields that the script adds.
    """
    row = _encode_fields(decision)
    rationale = decision.rationale
    extra = (
        rationale.inputs | ({"job": rationale.job} if rationale.job else {}) | row.pop("extra", {})
    )
    return row | {"index": index, "rule": rationale.rule, "extra": json.dumps(extra)}


def _encode_fields(decision: Decision) -> dict[str, Any]:
    """Return a decision's fields under its kind, or other fields where the script needs them."""
    kind = {"kind": DECISION_KINDS[type(decision)]}
    match decision:
        case PlaceInstance():
            return kind | _encode_placement(decision)
        case MarkWorkerLost(worker, rationale):
            reason = rationale.inputs.get("reason", "its worker has exited")
            return kind | {"worker": worker, "reason": reason}
        case AssignServices(host, services):
            names = list(services)
            return kind | {"host": host, "row": json.dumps(names), "extra": {"services": names}}
        case FinishMove(move, undone, details):
            row = {"id": move.id, "gang": move.gang, "started_ms": move.started_ms}
            return kind | row | {"undone": undone, "extra": details}
        case ReportMoveOutcome(job, details):
            return kind | {"job": job, "extra": details}
    rest = {one.name: getattr(decision, one.name) for one in fields(decision)}
    del rest["rationale"]
    return (
        kind
        | rest
        | ({"extra": {"job": rest["job"]}} if isinstance(decision, SetBlockReason) else {})
    )


def _encode_placement(decision: PlaceInstance) -> dict[str, Any]:
    instance, move = decision.instance, decision.move
    row = encode_instance(instance)
    fields = {key: row[key] for key in ("job", "role", "core", "tier", "generation", "epoch")}
    fields |= {"gang": decision.gang, "resident": instance.id, "pinned": instance.pinned}
    document = {
        "gang": decision.gang,
        "instance": instance.id,
        "ranks": list(instance.ranks),
        "generation": instance.generation,
        "epoch": instance.epoch,
        "row": json.dumps(row),
        "request_id": decision.request_id,
        "extra": fields | {"reason": decision.rationale.rule},
    }
    return document | ({"move": json.dumps(encode_move(move))} if move is not None else {})
