"""`meshrl trace`: reads the notes of a run's processes, also while it runs, and writes a trace."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files import documents
from meshrl.common.base.files.json_lines import iterate_rows
from meshrl.common.state.events import Event as RunEvent
from meshrl.directory.directory_paths import format_path
from meshrl.view.history.sample_files import ROTATED_SUFFIX
from meshrl.view.history.worker_timeline import WorkerTimeline
from meshrl.view.mesh.slice_lanes import OTHER, build_lanes
from meshrl.view.recording.run_record import read_events
from meshrl.view.trace.tracks import BarPart, BarShape, TraceBar, TraceEvent, TrackWriter

TRACE_FILE = "trace.json"
TRACE_DIRECTORY = "trace"
EVENTS_PER_WRITE = 1000  # events that are encoded together
MAX_TRAJECTORIES = 20_000  # trajectories of a shard, the last ones: Perfetto takes some 100 MB well


def export_trace(run_dir: Path, output_path: Path | None) -> None:
    """Write the trace of a run and print its path. Raises NotFound when nothing was noted."""
    if not any((run_dir / TRACE_DIRECTORY).glob("*.jsonl")):
        raise NotFound(
            f"{run_dir} has no traces",
            fix="Wait for the first trajectories, and set tracking.trace of the job above 0",
        )
    path = output_path or run_dir / TRACE_FILE
    count = write_trace(run_dir, path, read_events(run_dir))
    print(f"{format_path(path)}: {count:,} events. Open it at https://ui.perfetto.dev")


def write_trace(run_dir: Path, path: Path, events: list[RunEvent]) -> int:
    """Write a run's trace atomically; return its number of events. Raises OSError."""
    temporary = documents.temporary_path(path)
    try:
        with open(temporary, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
            count, drawing = 0, draw_trace(read_notes(run_dir), events)
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            # All at once take some hundred MB, and each by itself three times as long.
            while batch := list(islice(drawing, EVENTS_PER_WRITE)):
                text = json.dumps(batch, separators=(",", ":"))
                file.write((",\n" if count else "\n") + text[1:-1])
                count += len(batch)
            file.write("\n]}\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def read_notes(run_dir: Path) -> TraceNotes:
    """Return the notes of a run's processes; torn or corrupt lines are skipped."""
    found = TraceNotes()
    paths = (run_dir / TRACE_DIRECTORY).glob("*.jsonl")
    # A file that another has followed comes before that one.
    for path in sorted(
        paths, key=lambda path: (_parse_stem(path), not path.name.endswith(ROTATED_SUFFIX))
    ):
        kind, _, name = _parse_stem(path).partition("-")
        rows: deque[NoteRow] = deque(iterate_rows(path), maxlen=MAX_TRAJECTORIES)
        if kind == "shard":
            of = found.shards.setdefault(f"shard {name}", [])
            of += rows
            del of[:-MAX_TRAJECTORIES]
        elif kind == "engine":
            found.engines.setdefault(name, []).extend(rows)
        elif kind == "slices":
            found.slices += rows
        else:
            found.trainer += rows
    return found


def _parse_stem(path: Path) -> str:
    """Return the kind and the name of the process that has noted a file: `shard-0`."""
    return path.name.removesuffix(".jsonl").removesuffix(".older")


NoteRow = dict[str, Any]
# What the phases of a step are called in a trace.
PHASES = {
    "waiting": "wait",
    "computing": "train",
    "updating": "train: update",
    "evaluating": "held-out loss",
    "staging": "sync: stage",
    "checkpointing": "checkpoint: copy",
    "committing": "sync: commit",
    "telling": "sync: notify engines",
}


@dataclass
class TraceNotes:
    """Notes of the processes of a run, by the name of each."""

    shards: dict[str, list[NoteRow]] = field(default_factory=dict)
    trainer: list[NoteRow] = field(default_factory=list)
    engines: dict[str, list[NoteRow]] = field(default_factory=dict)
    slices: list[NoteRow] = field(default_factory=list)  # of all instances

    def iterate_rows(self) -> Iterator[NoteRow]:
        """Yield all rows."""
        for rows in (*self.shards.values(), self.trainer, *self.engines.values(), self.slices):
            yield from rows


def draw_trace(notes: TraceNotes, events: Sequence[RunEvent]) -> Iterator[TraceEvent]:
    """Yield the trace events of a run, whose events are in order."""
    start_times_s = [float(row["at"]) for row in notes.iterate_rows()] + [
        e.ms / 1000 for e in events[:1]
    ]
    tracks = TrackWriter(min(start_times_s, default=0.0))
    yield from _draw_job(tracks, events)
    yield from _draw_workers(tracks, events)
    yield from _draw_slices(tracks, notes.slices)
    trained = {  # by group, the step that trained it last: an abandoned one may have before
        int(group["group"]): int(event.fields["step"])
        for event in events
        if event.kind == "step"
        for group in event.fields["groups"]
    }
    arrows = Arrows()
    yield from arrows.collect_steps(_draw_trainer(tracks, notes.trainer))
    for name, rows in sorted(notes.engines.items()):
        bars = [
            TraceBar(
                f"version {r['version']}", r["at"], _parse_parts(r["parts"]), category="engines"
            )
            for r in rows
        ]
        yield from tracks.draw_bars("engines", name, bars)
    for name, rows in sorted(notes.shards.items()):
        bars = [_make_trajectory_bar(row, trained) for row in rows]
        yield from arrows.collect_trajectories(tracks.draw_bars(name, "trajectories", bars))
    yield from arrows.draw(trained)


def _draw_job(tracks: TrackWriter, events: Sequence[RunEvent]) -> Iterator[TraceEvent]:
    """Yield the phases of the job."""
    found = [event for event in events if event.kind == "phase"]
    last_ms = events[-1].ms if events else 0
    edges = [(e.ms, str(e.fields["phase"])) for e in found] + [(last_ms, "")]
    bars = [
        TraceBar(phase, ms / 1000, [(phase, max(0.0, after - ms))], {}, "job", BarShape.WHOLE)
        for (ms, phase), (after, _) in pairwise(edges)
    ]
    yield from tracks.draw_bars("job", "phase", bars)


def _draw_workers(tracks: TrackWriter, events: Sequence[RunEvent]) -> Iterator[TraceEvent]:
    """Yield a track for each worker with its instances' roles and tiers, and moves with reasons."""
    if not events:
        return
    start_ms = events[0].ms
    timeline = WorkerTimeline.from_events(events)
    tids: dict[str, int] = {}
    process, named = tracks.open_process("gangs")
    yield from named
    for worker in timeline.list_workers:
        tids[worker] = process.thread_count + 1
        bars = [
            TraceBar(
                span.role if span.state == "ready" else f"{span.role} ({span.state})",
                start_ms / 1000 + span.start_s,
                [(span.role, 1000 * (span.end_s - span.start_s))],
                {"resident": span.instance, "job": span.job, "why": span.reason},
                "gangs",
                BarShape.WHOLE,
            )
            for span in timeline.spans
            if worker in span.workers
        ]
        yield from tracks.draw_bars("gangs", worker, bars)
    for mark in timeline.moves:
        at_s = start_ms / 1000 + mark.at_s
        for worker in mark.workers or ("",):
            args = {"reason": mark.text}
            yield from tracks.draw_instant("gangs", tids.get(worker, 0), "move", at_s, args)


def _draw_slices(tracks: TrackWriter, notes: Sequence[NoteRow]) -> Iterator[TraceEvent]:
    """Yield a track for each gang with the time slices of the run's instances and its switches."""
    for lane in build_lanes(notes):
        bars = [
            TraceBar(
                span.label,
                span.start_s,
                [(span.label, 1000 * span.duration_s)],
                {
                    "resident": span.instance,
                    "function": span.function,
                    "loaded_bytes": span.loaded_bytes,
                    "hidden_bytes": span.hidden_bytes,
                }
                if span.kind != OTHER
                else {},
                f"{span.kind} {span.function}".strip(),
                BarShape.WHOLE,
            )
            for span in lane.spans
        ]
        yield from tracks.draw_bars("time slices", lane.gang, bars)


def _draw_trainer(tracks: TrackWriter, rows: Sequence[NoteRow]) -> Iterator[TraceEvent]:
    steps = [row for row in rows if row["kind"] == "step"]
    bars = [
        TraceBar(
            f"step {row['step']}",
            row["at"],
            [(PHASES.get(name, name), ms) for name, ms in _parse_parts(row["parts"])],
            {"step": row["step"], "tokens": row["tokens"]},
            "trainer",
        )
        for row in steps
    ]
    yield from tracks.draw_bars("trainer", "steps", bars)
    intake = [
        TraceBar(
            "intake",
            r["at"],
            _parse_parts(r["intake"]),
            {"step": r["step"]},
            "trainer",
            BarShape.PARTS,
        )
        for r in steps
    ]
    yield from tracks.draw_bars("trainer", "pack", intake)
    rounds = [
        TraceBar(
            "round", r["at"] + at / 1000, [("", ms)], {"step": r["step"]}, "trainer", BarShape.WHOLE
        )
        for r in steps
        for at, ms in zip(r["rounds"][::2], r["rounds"][1::2], strict=True)
    ]
    yield from tracks.draw_bars("trainer", "rounds", rounds)
    name, step = "checkpoint: write", "step"
    written = [
        TraceBar(
            name, r["at"], _parse_parts(r["parts"]), {step: r[step]}, "trainer", BarShape.WHOLE
        )
        for r in rows
        if r["kind"] == "checkpoint"
    ]
    yield from tracks.draw_bars("trainer", "checkpoints", written)


def _make_trajectory_bar(row: NoteRow, trained: dict[int, int]) -> TraceBar:
    kind = "" if row["training"] else "evaluation "
    about = ("version", "prompt", "tokens", "ending", "reward")
    args = {"group": row["group"], "member": row["member"]} | {key: row[key] for key in about}
    if row["training"] and row["group"] in trained:
        args["trained in step"] = trained[row["group"]]
    name = f"{kind}{row['group'] % (1 << 20)}.{row['member']}"
    return TraceBar(name, row["at"], _parse_parts(row["parts"]), args, "trajectory")


def _parse_parts(flat: Sequence[Any]) -> list[BarPart]:
    return [(str(name), float(ms)) for name, ms in zip(flat[::2], flat[1::2], strict=True)]


ARROW_FIELDS = {"name": "trained", "cat": "trained"}


class Arrows:
    """Collector of spans, from which arrows are drawn."""

    def __init__(self) -> None:
        self._steps: dict[int, TraceEvent] = {}
        self._last_trajectories: dict[
            int, TraceEvent
        ] = {}  # by group, its trajectory that ended last

    def collect_steps(self, events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
        """Pass the trainer's events on and collect its steps."""
        for event in events:
            if event["ph"] == "X" and event["name"] == f"step {event.get('args', {}).get('step')}":
                self._steps[event["args"]["step"]] = event
            yield event

    def collect_trajectories(self, events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
        """Pass a shard's events on and collect its trajectories."""
        for event in events:
            if event["ph"] == "X" and "group" in event.get("args", {}):
                group = event["args"]["group"]
                before = self._last_trajectories.get(group)
                if before is None or _end_us(event) > _end_us(before):
                    self._last_trajectories[group] = event
            yield event

    def draw(self, trained: Mapping[int, int]) -> Iterator[TraceEvent]:
        """Yield the arrows; `trained` maps each group to the step that trained it."""
        for group, source in self._last_trajectories.items():
            step = self._steps.get(trained.get(group, -1))
            if step is None or _end_us(step) <= _end_us(source):
                continue  # clocks of hosts that differ, or a lineage that was abandoned
            where = {"id": group, "pid": source["pid"], "tid": source["tid"]}
            yield ARROW_FIELDS | where | {"ph": "s", "ts": max(source["ts"], _end_us(source) - 1)}
            where = {"id": group, "pid": step["pid"], "tid": step["tid"]}
            yield (
                ARROW_FIELDS
                | where
                | {"ph": "f", "bp": "e", "ts": max(step["ts"], _end_us(source))}
            )


def _end_us(span: TraceEvent) -> int:
    return int(span["ts"]) + int(span["dur"])
