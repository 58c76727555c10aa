"""Builds the summary of a run, one dictionary that is nearly flat: `summary.json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshrl.common.state.events import Event
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.store.explained import OPENING, PLANNED
from meshrl.common.state.pool.workers.rows import Role
from meshrl.view.history.failures import listed
from meshrl.view.history.held import held_s
from meshrl.view.history.news import unforeseen
from meshrl.view.history.run_snapshot import Evaluation
from meshrl.view.mesh import prefixes
from meshrl.view.recording.usage import Tally

TRADED = {Role.ROLLOUT, Role.TRAINING}


ACCOUNT = (
    *("opened", "trained", "filtered", "stale_requeued", "host_lost", "in_flight"),
    *("lost", "trained_twice", "opened_twice", "committed_twice", "typed_drops"),
)


@dataclass(frozen=True)
class RunEnd:
    """How a run stands when it is summarized."""

    job: str
    phase: Phase
    seed: int
    wall_s: float
    account: dict[str, int]


def outcome(end: RunEnd, steps: int) -> dict[str, Any]:
    """The part of a summary that says how a run ended; `steps` are those that are done."""
    told = {"job": end.job, "phase": end.phase, "seed": end.seed, "steps": steps}
    return told | {"wall_s": round(end.wall_s, 1)} | {term: end.account[term] for term in ACCOUNT}


def summarize(
    end: RunEnd,
    rows: Iterable[dict[str, Any]],
    evaluations: Sequence[Evaluation],
    events: Sequence[Event],
    tally: Tally,
) -> dict[str, Any]:
    """The summary of a run from its record; rows are gone through once."""
    cpu_s = tally.cpu_by_name()
    steps = tokens = tokens_trained = 0
    gap: float | None = None
    for row in rows:
        steps += 1
        tokens += int(row["tokens"])
        tokens_trained += int(row["tokens_trained"])
        if row.get("logprob_gap") is not None:
            gap = max(gap or 0.0, float(row["logprob_gap"]))
    ended = sum(end.account[fate] for fate in ("trained", "filtered", "typed_drops"))
    return outcome(end, steps) | {
        "held_out": {
            "before": _accuracy(evaluations, "before"),
            "after": _accuracy(evaluations, "after"),
        },
        "evaluations": [_evaluation(e) for e in evaluations],
        "best_version": next((e.step for e in reversed(evaluations) if e.best), None),
        "warm_start_cached": tally.warm_start_cached,
        "cpu_s": cpu_s,
        "cpu_total_s": round(sum(cpu_s.values()), 1),
        "cpu_shared_s": round(tally.shared_s, 1),
        "accelerator_s": round(tally.accelerator_s, 1),
        **{
            f"{state}_s": round(seconds, 1)
            for state, seconds in held_s(events, end.job, sessions=tally.sessions).items()
        },
        "tokens_rolled_out": tokens,
        "tokens_sampled": tally.total_tokens("rollout/"),
        "tokens_trained": tokens_trained,
        "prefixes": prefixes.summed(tally.prefixes.values()),
        # Of the trajectories that have ended, those without a reward.
        "failed_share": round(end.account["typed_drops"] / max(1, ended), 4),
        "failures": listed(events),
        "workers_moved": len(planned_moves(events)),
        "hosts_lost": sum(event.kind == "host_lost" for event in events),
        "logprob_gap_max": gap,
        "processes_ended": sum(int(e.fields.get("count", 1)) for e in events if unforeseen(e)),
    }


def moves(events: Sequence[Event]) -> list[Event]:
    """Completed moves of gangs between rollout and training, whoever decided them."""
    return [e for e in events if e.kind == "move" and {e.fields["from"], e.fields["to"]} == TRADED]


def planned_moves(events: Sequence[Event]) -> list[Event]:
    """The moves that the planner decided for faster steps, each once, while
    every other gang went on: it generated, computed bins or committed between start and end.
    """
    first = next((e.ms for e in events if e.kind == "step"), None)
    if first is None:
        return []
    found = {
        e.fields["resident"]: e
        for e in moves(events)
        if e.fields.get("policy") in PLANNED
        and not e.fields["undone"]
        and (e.fields["policy"] == OPENING or float(e.fields["started_ms"]) > first)
        and all(other["after"] > other["before"] for other in e.fields.get("others", {}).values())
    }
    return list(found.values())


def _evaluation(e: Evaluation) -> dict[str, Any]:
    """Its figures, and of which share of their samples they are where that is not all."""
    missing = {name: share for name, share in e.shares.items() if share < 1.0}
    found: dict[str, Any] = {"tag": e.tag, "step": e.step, "figures": e.figures}
    return found | ({"shares": missing, "reasons": e.reasons} if missing else {})


def _accuracy(evaluations: Sequence[Evaluation], tag: str) -> dict[str, float] | None:
    found = next((e for e in evaluations if e.tag == tag), None)
    if found is None or found.sampled is None:
        return None
    shares = {name.rpartition(".")[2]: s for name, s in found.shares.items() if s < 1.0}
    missing = {f"{name}_share": s for name, s in shares.items() if name in ("sampled", "greedy")}
    return {"sampled": found.sampled, "greedy": found.greedy or 0.0} | missing
