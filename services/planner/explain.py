"""What the planner would decide, and why: `python -m meshrl.services.planner.explain < look.json`.

Reads `{"snapshot": ..., "memory": ...}` (or a snapshot alone) and prints each decision with its
rule and the figures that it was made by. Nothing is written anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from meshrl.common.base.errors import MeshError
from meshrl.common.base.host.terminal import guarded_output
from meshrl.common.state.pool.placing.decisions import (
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
)
from meshrl.common.state.pool.placing.snapshot import Snapshot
from meshrl.common.state.pool.store.reading import snapshot_of
from meshrl.services.planner.admission.takers import Takers
from meshrl.services.planner.decide import decide
from meshrl.services.planner.memory import PlannerMemory
from meshrl.services.planner.pool.presence import present


def told(decision: Decision) -> str:
    """What is decided, in words."""
    match decision:
        case Form(gang, workers):
            return f"form {gang} of {', '.join(workers)}"
        case Dissolve(gang):
            return f"dissolve {gang}"
        case Place(gang, r):
            role = "core" if r.core else r.role
            turns = " by turns" if r.turns else ""
            return f"place {r.id}: {role} of {r.job} on {gang} in {r.tier}{turns}"
        case Remove(_, resident):
            return f"remove {resident}"
        case Lose(worker):
            return f"lose {worker}"
        case HostGone(host, back):
            return f"{host} is back" if back else f"lose the host {host}"
        case Admit(job, held):
            return f"hold {job}: {held}" if held else f"admit {job}"
        case FailJob(job, error):
            return f"fail {job}: {error}"
        case Serve(host, services):
            return f"serve on {host}: {', '.join(services) or 'nothing'}"
        case FinishMove(move, undone):
            return f"move of {move.id} {'undone' if undone else 'complete'}"
        case Decline(op, reason):
            return f"decline {op}: {reason}" if reason else f"settle {op}"
        case Judge(job, details):
            return f"judge the move of {job} at step {details['step']}"


def lines(decisions: Iterable[Decision]) -> list[str]:
    """A line for each decision: what, by which rule, by which figures."""
    found = []
    for decision in decisions:
        inputs = " ".join(f"{key}={value}" for key, value in decision.why.inputs.items())
        found.append(f"{told(decision)}  [{decision.why.rule}{' ' if inputs else ''}{inputs}]")
    return found


def predictions(memory: PlannerMemory) -> list[str]:
    """A line for each job whose steps are predicted: what, beside what was observed, and how far
    predictions of its moves have been off; and one for each degree of its engines whose speed was
    predicted and measured.
    """
    found = []
    for job, watch in sorted(memory.watches.items()):
        told = watch.explained
        if "step_s" in told:
            stages = f"rollout {told['rollout_s']:.3g} s, training {told['train_s']:.3g} s"
            step = f"step {told['step_s']:.3g} s, observed {told['measured_s']:.3g} s"
            error = told.get("error")
            off = f", moves were predicted {error:.0%} off" if error is not None else ""
            found.append(f"{job}: {stages}; {step}{off}; {told['verdict']}")
        if trained := told.get("training"):
            found.append(
                f"{job}: a step's gradients on one {trained['kind']}: "
                f"{trained['predicted_s']:.3g} s, observed {trained['observed_s']:.3g} s, "
                f"predictions were {trained['error']:.0%} off"
            )
        for which, figures in told.get("degrees", {}).items():
            found.append(
                f"{job}: a decode step of {which}: {1000 * figures['predicted_s']:.3g} ms, "
                f"observed {1000 * figures['observed_s']:.3g} ms, "
                f"predictions were {figures['error']:.0%} off"
            )
    return found


def documents(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """The decisions as JSON takes them, with all that they say."""
    return [{"kind": kind_of(one), **asdict(one)} for one in decisions]


def kind_of(decision: Decision) -> str:
    """The name of a decision in JSON, which does not change with that of its class."""
    return "finish" if isinstance(decision, FinishMove) else type(decision).__name__.lower()


def unplaced(snapshot: Snapshot, memory: PlannerMemory, decisions: Iterable[Decision]) -> list[str]:
    """A line for the shards, and one for the sandboxes, of each job that are on no host when all
    is done that is decided: what the hosts say.
    """
    there = {host.name: host.services for host in snapshot.hosts}
    there |= {one.host: one.services for one in decisions if isinstance(one, Serve)}
    placed = {name for services in there.values() for name in services}
    takers = Takers(snapshot, present(snapshot, memory))
    return [
        f"nowhere {lacking}" for job in snapshot.jobs for lacking in takers.lacking(job, placed)
    ]


def main() -> int:
    """Explains the look on standard input; the exit status, 2 when it cannot be read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="prints documents, and the memory")
    a = parser.parse_args()
    try:
        asked = json.load(sys.stdin)
        snapshot = snapshot_of(asked.get("snapshot", asked))
    except (MeshError, json.JSONDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    decisions, memory = decide(snapshot, PlannerMemory.of(asked.get("memory") or {}))
    if a.json:
        print(json.dumps({"decisions": documents(decisions), "memory": memory.document()}))
    else:
        print("\n".join(lines(decisions)) or "nothing: all is as it should be")
        for line in predictions(memory):
            print(line)
        for line in unplaced(snapshot, PlannerMemory.of(asked.get("memory") or {}), decisions):
            print(line)
    return 0


if __name__ == "__main__":
    with guarded_output():
        sys.exit(main())
