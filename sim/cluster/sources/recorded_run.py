"""Scenario of a recorded run, from the files of its directory alone. It has the run's lengths and
tools, speeds of engines and trainer, move durations, and step times.

A trajectory's turns follow from its states. Its tokens are divided among its turns by decoding
time, and other states keep their duration. The decoding speed is a line through all trajectories,
by the number of concurrent ones at an engine.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files import json_lines
from meshrl.common.state.events import Event
from meshrl.common.state.pool.workers.rows import Role
from meshrl.job.toml.writer import to_toml
from meshrl.view.history.worker_timeline import RoleSpan, build_spans
from meshrl.view.recording.run_record import read_events, read_job
from meshrl.view.trace.trace_writer import read_notes

MIN_TRAJECTORIES = 16  # minimum number of trajectories
READY_STATUS = "ready"
TRACE_FILE = "trajectories.jsonl"  # beside the scenario

TraceRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Scenario and trace extracted from a run."""

    scenario: dict[str, Any]  # keys of the scenario
    trajectories: list[TraceRow]  # trajectories, as the lines of a trace
    step_s: float  # mean of the run itself


def read_run(run_dir: Path) -> RecordedRun:
    """Read a run's directory; raise NotFound with the missing file."""
    if not (run_dir / "job.json").is_file():
        raise NotFound(
            f"{run_dir} is not a run directory", fix="Pass a run directory, such as runs/calculator"
        )
    job, document = read_job(run_dir)
    events = read_events(run_dir)
    found = read_notes(run_dir)
    rows = [  # trained trajectories that were not cut
        row
        for of in found.shards.values()
        for row in of
        if row.get("kind") == "trajectory" and row["training"] and row["ending"]
    ]
    steps = [row for row in found.trainer if row.get("kind") == "step"]
    if len(rows) < MIN_TRAJECTORIES or len(steps) < 2:
        raise NotFound(
            f"{run_dir} has too few traces: {len(rows)} trajectories and {len(steps)} steps",
            fix="Run it longer, with tracking.trace of its job above 0",
        )
    engines = _find_engine_spans(events)
    sampled = _compute_sampled_share(run_dir, rows)
    share = min(1.0, float(document["tracking"]["trace"]) or 1.0)
    base_s, sequence_s = _fit_decode_line(rows, engines, sampled, share)
    tokens_per_s, update_s = _compute_training_speed(steps, sum(row["tokens"] for row in steps))
    at = [row["at"] for row in steps]
    span_s = at[-1] - at[0]
    algorithm, rollout, training = (document[n] for n in ("algorithm", "rollout", "training"))
    kind = "CPU" if document["mesh"]["device"] == "cpu" else "GPU"
    desired = [event.fields["workers"] for event in events if event.kind == "desired"]
    workers = max(1, len({worker for there in desired for worker in there}))
    pauses = [
        dict(pairwise(row["parts"])).get("pause", 0.0)
        for of in found.engines.values()
        for row in of
    ]
    scenario = {
        "title": f"{job}, as it ran in {run_dir.name}",
        "sources": [f"the traces, events and metrics of {run_dir.name}"],
        "hosts": [{"kind": kind, "accelerators": workers}],
        "switches": _compute_switch_times(events),
        "jobs": [
            {
                "name": job,
                "steps": len(steps),
                "groups_per_step": int(algorithm["groups_per_step"]),
                "group_size": int(algorithm["group_size"]),
                "max_staleness": int(algorithm["max_staleness"]),
                "slots": int(rollout["slots"]),
                "ranks": int(training["ranks"]),
                "bin_tokens": int(training["bin_tokens"]),
                "degrees": list(rollout["tensor_parallel"]),
                "planner": dict(document["planner"]),
                "measured": {
                    "kind": kind,
                    "degree": min(rollout["tensor_parallel"]),
                    "base_s": base_s,
                    "sequence_s": sequence_s,
                    "train_tokens_per_s": tokens_per_s,
                    "update_s": update_s,
                },
                "pull_s": median(pauses) / 1000 if pauses else 0.0,
                "workload": {"trace": TRACE_FILE},
            }
        ],
    }
    return RecordedRun(
        scenario, [_build_trace_line(row, sampled) for row in rows], span_s / (len(steps) - 1)
    )


def _compute_sampled_share(run_dir: Path, rows: Sequence[TraceRow]) -> float:
    """Compute the sampled share of the tokens after prompts."""
    trained = json_lines.read_lines(run_dir / "metrics.jsonl").rows
    sampled = sum(sum(row.get("staleness_tokens", ())) for row in trained)
    tokens = sum(row.get("tokens_trained", 0) for row in trained)
    prompt = fmean(row["prompt"] for row in rows) / fmean(row["tokens"] for row in rows)
    behind = tokens * (1 - prompt)
    return min(1.0, sampled / behind) if behind > 0 and sampled else 1.0


def _list_states(row: TraceRow) -> list[tuple[str, float, float]]:
    """List the states with their start and duration in seconds."""
    parts = row["parts"]
    names, took_s = parts[::2], [ms / 1000 for ms in parts[1::2]]
    start_times_s = accumulate(took_s[:-1], initial=row["at"])
    return list(zip(names, start_times_s, took_s, strict=True))


def _build_trace_line(row: TraceRow, sampled_share: float) -> TraceRow:
    turns: list[list[float]] = []  # seconds of decoding, and of the following states
    before_s = 0.0  # before the first turn; counted after it
    for name, _, took_s in _list_states(row):
        if name == "decode":
            turns.append([took_s, 0.0])
        elif turns and name not in ("queue", "cache"):
            turns[-1][1] += took_s
        elif name not in ("queue", "cache"):
            before_s += took_s
    turns = turns or [[0.0, 0.0]]
    turns[0][1] += before_s
    behind = max(1.0, row["tokens"] - row["prompt"])
    whole_s = sum(decode_s for decode_s, _ in turns) or 1.0
    answer = behind * (1 - sampled_share) / max(1, len(turns) - 1)
    turn_rows = [
        {
            "tokens": round(max(1.0, behind * sampled_share * decode_s / whole_s), 1),
            "tool_s": round(tool_s, 4),
            "answer": round(answer, 1),
        }
        for decode_s, tool_s in turns
    ]
    return {"prompt": row["prompt"], "turns": turn_rows}


def _find_engine_spans(events: Sequence[Event]) -> list[RoleSpan]:
    if not events:
        return []
    end = (events[-1].ms - events[0].ms) / 1000
    start = events[0].ms / 1000
    return [
        RoleSpan(s.worker_names, s.role, s.state, start + s.start_s, start + s.end_s)
        for s in build_spans(events, events[0].ms, end)
        if s.role == Role.ROLLOUT and s.state == READY_STATUS
    ]


def _fit_decode_line(
    rows: Sequence[TraceRow], engines: Sequence[RoleSpan], sampled_share: float, traced_share: float
) -> tuple[float, float]:
    """Fit the seconds of a decode step, and of each sequence in it. The line goes through the
    trajectories, by the number at an engine; `traced_share` of them are in the traces.
    """
    edges: list[tuple[float, int]] = []
    for row in rows:
        for name, began, took_s in _list_states(row):
            if name in ("decode", "prefill"):
                edges += [(began, 1), (began + took_s, -1)]
    edges.sort()
    times = [at for at, _ in edges]
    counts = list(accumulate(more for _, more in edges))
    token_times_s, batch_sizes, weights = [], [], []
    for row in rows:
        decodes = [(b, t) for name, b, t in _list_states(row) if name == "decode" and t > 0]
        decode_s = sum(took_s for _, took_s in decodes)
        tokens = max(1.0, (row["tokens"] - row["prompt"]) * sampled_share)
        if decode_s <= 0:
            continue
        batch = sum(
            took_s
            * counts[max(0, bisect(times, began + took_s / 2) - 1)]
            / traced_share
            / max(1, sum(span.start_s <= began + took_s / 2 < span.end_s for span in engines))
            for began, took_s in decodes
        )
        token_times_s.append(decode_s / tokens)
        batch_sizes.append(max(1.0, batch / decode_s))
        weights.append(tokens**0.5)
    x, y, w = np.array(batch_sizes), np.array(token_times_s), np.array(weights)
    slope, base = (
        np.polyfit(x, y, 1, w=w) if np.ptp(x) > 1 else (0.0, float(np.average(y, weights=w)))
    )
    if slope < 0 or base <= 0:
        through = float(np.average(y, weights=w * w))
        return (through, 0.0) if slope < 0 else (1e-6, float(np.average(y / x, weights=w * w)))
    return float(base), float(slope)


def _compute_training_speed(steps: Sequence[TraceRow], tokens: float) -> tuple[float, float]:
    """Compute the gradient rate of one worker in tokens per second, and the seconds of the
    undivided part.
    """
    computed_ms = sum(sum(row.get("rounds", ())[1::2]) for row in steps)
    update_parts = ("updating", "staging", "checkpointing", "committing", "telling")
    update_ms = []
    for row in steps:
        parts = dict(zip(row["parts"][::2], row["parts"][1::2], strict=True))
        update_ms.append(sum(parts.get(name, 0.0) for name in update_parts))
    return 1000 * tokens / max(computed_ms, 1e-3), median(update_ms) / 1000


def _compute_switch_times(events: Sequence[Event]) -> dict[str, float]:
    """Compute the start times of engines and hybrids. Cores are excluded, as they include a warm
    start and never move.
    """
    starts: dict[str, tuple[str, int]] = {}
    took_s: dict[str, list[float]] = {Role.ROLLOUT: [], Role.TRAINING: []}
    for event in events:
        fields = event.fields
        resident = str(fields.get("resident", ""))
        if event.kind == "desired" and fields["role"] in took_s and not fields["core"]:
            starts.setdefault(resident, (str(fields["role"]), event.ms))
        elif event.kind == "actual" and fields.get("status") == READY_STATUS and resident in starts:
            role, since_ms = starts.pop(resident)
            took_s[role].append((event.ms - since_ms) / 1000)
    every = [one for found in took_s.values() for one in found]
    if not every:
        return {}
    return {f"{role}_s": round(median(found or every), 3) for role, found in took_s.items()}


def write_scenario(run: RecordedRun, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in run.trajectories)
    (folder / TRACE_FILE).write_text(text, encoding="utf-8")
    path = folder / "scenario.toml"
    path.write_text(to_toml(run.scenario), encoding="utf-8")
    return path
