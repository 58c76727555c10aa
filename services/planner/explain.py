"""Explanation of decisions: `python -m meshrl.services.planner.explain < look.json`.

It reads `{"snapshot": ..., "memory": ...}` (or a snapshot alone), and prints each decision with its
rule and figures. It writes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from meshrl.common.base.errors import MeshError
from meshrl.common.base.host.terminal import escaped_output
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
from meshrl.common.state.pool.scheduling.snapshot import PoolSnapshot
from meshrl.common.state.pool.store.snapshot_documents import decode_snapshot
from meshrl.services.planner.admission.service_hosts import ServiceHosts
from meshrl.services.planner.decision import decide
from meshrl.services.planner.memory import PlannerMemory
from meshrl.services.planner.pool.presence import compute_presence

# Names of decisions in the JSON output, which do not change.
_JSON_KINDS: Mapping[type, str] = {
    FormGang: "form",
    DissolveGang: "dissolve",
    PlaceInstance: "place",
    RemoveInstance: "remove",
    MarkWorkerLost: "lose",
    ReportHostPresence: "hostgone",
    SetBlockReason: "admit",
    SetSeeding: "seed",
    FailJob: "failjob",
    AssignServices: "serve",
    FinishMove: "finish",
    RejectRequest: "decline",
    ReportMoveOutcome: "judge",
}


def describe_decision(decision: Decision) -> str:
    """Describe a decision in words."""
    match decision:
        case FormGang(gang, workers):
            return f"form {gang} of {', '.join(workers)}"
        case DissolveGang(gang):
            return f"dissolve {gang}"
        case PlaceInstance(gang, r):
            role = "core" if r.core else r.role
            turns = " in time slices" if r.time_sliced else ""
            return f"place {r.id}: {role} of {r.job} on {gang} in {r.tier}{turns}"
        case RemoveInstance(_, resident):
            return f"remove {resident}"
        case MarkWorkerLost(worker):
            return f"mark {worker} lost"
        case ReportHostPresence(host, back):
            return f"mark host {host} present" if back else f"mark host {host} lost"
        case SetBlockReason(job, held):
            return f"block {job}: {held}" if held else f"admit {job}"
        case SetSeeding(job, seed_ms):
            until = "all the time" if seed_ms < 0 else f"for {seed_ms / 1000:.3g} s of a step"
            return f"generate on the core's workers of {job} {until}"
        case FailJob(job, error):
            return f"fail {job}: {error}"
        case AssignServices(host, services):
            return f"run services on {host}: {', '.join(services) or 'nothing'}"
        case FinishMove(move, undone):
            return f"move of {move.id} {'undone' if undone else 'complete'}"
        case RejectRequest(op, reason):
            return f"reject {op}: {reason}" if reason else f"accept {op}"
        case ReportMoveOutcome(job, details):
            return f"report the outcome of the move of {job} at step {details['step']}"


def format_decisions(decisions: Iterable[Decision]) -> list[str]:
    """Format a line for each decision, with its rule and its figures."""
    found = []
    for decision in decisions:
        inputs = " ".join(f"{key}={value}" for key, value in decision.rationale.inputs.items())
        found.append(
            f"{describe_decision(decision)}  "
            f"[{decision.rationale.rule}{' ' if inputs else ''}{inputs}]"
        )
    return found


def format_predictions(memory: PlannerMemory) -> list[str]:
    """Format a line for each job with predicted steps: predictions, observations and errors of past
    moves. Add a line for each degree of engines with predicted and measured speed.
    """
    found = []
    for job, watch in sorted(memory.split_states.items()):
        explanation = watch.explanation
        if "step_s" in explanation:
            stages = (
                f"rollout {explanation['rollout_s']:.3g} s, training {explanation['train_s']:.3g} s"
            )
            step = f"step {explanation['step_s']:.3g} s, observed {explanation['measured_s']:.3g} s"
            error = explanation.get("median_error")
            off = f", moves were predicted {error:.0%} off" if error is not None else ""
            found.append(f"{job}: {stages}; {step}{off}; {explanation['verdict']}")
        if cost := explanation.get("hybrid_cost"):
            found.append(f"{job}: {cost}")
        if trained := explanation.get("training"):
            found.append(
                f"{job}: a step's gradients on one {trained['kind']}: "
                f"{trained['predicted_s']:.3g} s, observed {trained['observed_s']:.3g} s, "
                f"predictions were {trained['error']:.0%} off"
            )
        for which, figures in explanation.get("degrees", {}).items():
            found.append(
                f"{job}: a decode step of {which}: {1000 * figures['predicted_s']:.3g} ms, "
                f"observed {1000 * figures['observed_s']:.3g} ms, "
                f"predictions were {figures['error']:.0%} off"
            )
    return found


def encode_decisions(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """Encode the decisions with all fields for JSON."""
    return [{"kind": get_decision_kind(one), **asdict(one)} for one in decisions]


def get_decision_kind(decision: Decision) -> str:
    """Return the name of a decision in JSON, which is independent of its class name."""
    return _JSON_KINDS[type(decision)]


def list_unplaced_services(
    snapshot: PoolSnapshot, memory: PlannerMemory, decisions: Iterable[Decision]
) -> list[str]:
    """List the shards and sandboxes that remain on no host after the decisions, with the reasons of
    the hosts.
    """
    services_by_host = {host.name: host.services for host in snapshot.hosts}
    services_by_host |= {
        one.host: one.services for one in decisions if isinstance(one, AssignServices)
    }
    placed = {name for services in services_by_host.values() for name in services}
    takers = ServiceHosts(snapshot, compute_presence(snapshot, memory))
    return [
        f"nowhere {lacking}"
        for job in snapshot.jobs
        for lacking in takers.explain_unplaced(job, placed)
    ]


def main() -> int:
    """Explain the snapshot on standard input; return the exit status, 2 if it cannot be read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print decisions and memory as JSON")
    a = parser.parse_args()
    try:
        document = json.load(sys.stdin)
        snapshot = decode_snapshot(document.get("snapshot", document))
    except (MeshError, json.JSONDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    decisions, memory = decide(snapshot, PlannerMemory.decode(document.get("memory") or {}))
    if a.json:
        print(json.dumps({"decisions": encode_decisions(decisions), "memory": memory.encode()}))
    else:
        print(
            "\n".join(format_decisions(decisions))
            or "no decisions: the pool is in its desired state"
        )
        for line in format_predictions(memory):
            print(line)
        for line in list_unplaced_services(
            snapshot, PlannerMemory.decode(document.get("memory") or {}), decisions
        ):
            print(line)
    return 0


if __name__ == "__main__":
    with escaped_output():
        sys.exit(main())
