"""Decisions as the script that writes them takes them: what it acts by, and what events tell."""

from __future__ import annotations

import json
from typing import Any

from common.state.pool.placing.decisions import (
    Admit,
    Decision,
    Decline,
    Dissolve,
    FailJob,
    FinishMove,
    Form,
    HostGone,
    Judge,
    Lose,
    Place,
    Remove,
    Serve,
    Why,
)
from common.state.pool.store.documents import move_document, resident_document


def written(decision: Decision, index: int) -> dict[str, Any]:
    """The arguments of one decision, the `index`-th of its write. `extra` is what its event tells
    beside what the script knows better.
    """
    row = _arguments(decision)
    extra = _inputs(decision.why) | row.pop("extra", {})
    return row | {"index": index, "rule": decision.why.rule, "extra": json.dumps(extra)}


def _inputs(why: Why) -> dict[str, Any]:
    return {**why.inputs, **({"job": why.job} if why.job else {})}


def _arguments(decision: Decision) -> dict[str, Any]:
    match decision:
        case Form(gang, workers):
            return {"kind": "form", "gang": gang, "workers": list(workers)}
        case Dissolve(gang):
            return {"kind": "dissolve", "gang": gang}
        case Place():
            return _place(decision)
        case Remove(gang, resident, _, op):
            return {"kind": "remove", "gang": gang, "resident": resident, "op": op}
        case Lose(worker, why):
            reason = why.inputs.get("reason", "its worker is gone")
            return {"kind": "lose", "worker": worker, "reason": reason}
        case HostGone(host, back):
            return {"kind": "host_gone", "host": host, "back": back}
        case Admit(job, held):
            return {"kind": "admit", "job": job, "held": held, "extra": {"job": job}}
        case FailJob(job, error):
            return {"kind": "fail", "job": job, "error": error}
        case Serve(host, services):
            names = list(services)
            told = {"services": names}
            return {"kind": "serve", "host": host, "row": json.dumps(names), "extra": told}
        case FinishMove(move, undone, details):
            return {
                "kind": "finish",
                "id": move.id,
                "gang": move.gang,
                "started_ms": move.started_ms,
                "undone": undone,
                "extra": details,
            }
        case Decline(op, reason):
            return {"kind": "decline", "op": op, "reason": reason}
        case Judge(job, details):
            return {"kind": "judge", "job": job, "extra": details}


def _place(decision: Place) -> dict[str, Any]:
    resident, move = decision.resident, decision.move
    row = resident_document(resident)
    told = {key: row[key] for key in ("job", "role", "core", "tier", "generation", "epoch")}
    about = {"gang": decision.gang, "resident": resident.id, "pinned": resident.pinned}
    found = {
        "kind": "place",
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
