"""`meshrl trace`: reads what a run's processes have noted, also while it goes on, and writes a
trace.
"""

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
from meshrl.common.base.files.lines import whole
from meshrl.common.state.events import Event as RunEvent
from meshrl.directory.places import shown
from meshrl.view.history.gangs import WorkerTimeline
from meshrl.view.history.samples import OLDER
from meshrl.view.recording.recorded import read_events
from meshrl.view.trace.tracks import Bar, Event, Part, Shape, Tracks

NAME = "trace.json"
FOLDER = "trace"
BATCH = 1000  # events that are encoded together
MOST = 20_000  # trajectories of a shard, the last ones: Perfetto takes some 100 MB well


def show(run_dir: Path, out: Path | None) -> None:
    """Writes the trace of a run and says where it lies; NotFound when nothing was noted."""
    if not any((run_dir / FOLDER).glob("*.jsonl")):
        raise NotFound(
            f"{run_dir} has no traces",
            fix="they come with the first trajectories, unless tracking.trace of the job is 0",
        )
    path = out or run_dir / NAME
    count = write(run_dir, path, read_events(run_dir))
    print(f"{shown(path)}: {count:,} events. Open it at https://ui.perfetto.dev")


def write(run_dir: Path, path: Path, events: list[RunEvent]) -> int:
    """Writes a run's trace, whole or not at all; how many events it has. OSError."""
    beside = documents.in_the_making(path)
    try:
        with open(beside, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
            count, drawing = 0, drawn(noted(run_dir), events)
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            # All at once take some hundred MB, and each by itself three times as long.
            while batch := list(islice(drawing, BATCH)):
                text = json.dumps(batch, separators=(",", ":"))
                file.write((",\n" if count else "\n") + text[1:-1])
                count += len(batch)
            file.write("\n]}\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return count


def noted(run_dir: Path) -> TraceNotes:
    """What the processes of a run have noted; lines that are torn or damaged are left out."""
    found = TraceNotes()
    paths = (run_dir / FOLDER).glob("*.jsonl")
    # A file that another has followed comes before that one.
    for path in sorted(paths, key=lambda path: (_stem(path), not path.name.endswith(OLDER))):
        kind, _, name = _stem(path).partition("-")
        rows: deque[Row] = deque(whole(path), maxlen=MOST)
        if kind == "shard":
            of = found.shards.setdefault(f"shard {name}", [])
            of += rows
            del of[:-MOST]
        elif kind == "engine":
            found.engines.setdefault(name, []).extend(rows)
        else:
            found.trainer += rows
    return found


def _stem(path: Path) -> str:
    """Return the kind and the name of the process that has noted a file: `shard-0`."""
    return path.name.removesuffix(".jsonl").removesuffix(".older")


Row = dict[str, Any]
# What the phases of a step are called in a trace.
PHASES = {
    "waiting": "wait",
    "computing": "train",
    "updating": "train: update",
    "staging": "sync: stage",
    "checkpointing": "checkpoint: copy",
    "committing": "sync: commit",
    "telling": "sync: tell engines",
}


@dataclass
class TraceNotes:
    """What the processes of a run have noted, by the name of each."""

    shards: dict[str, list[Row]] = field(default_factory=dict)
    trainer: list[Row] = field(default_factory=list)
    engines: dict[str, list[Row]] = field(default_factory=dict)

    def rows(self) -> Iterator[Row]:
        """All of them."""
        for rows in (*self.shards.values(), self.trainer, *self.engines.values()):
            yield from rows


def drawn(noted: TraceNotes, events: Sequence[RunEvent]) -> Iterator[Event]:
    """The events of a trace of a run, whose events are in order."""
    begun = [float(row["at"]) for row in noted.rows()] + [e.ms / 1000 for e in events[:1]]
    tracks = Tracks(min(begun, default=0.0))
    yield from _job(tracks, events)
    yield from _gangs(tracks, events)
    trained = {  # by group, the step that trained it last: an abandoned one may have before
        int(group["group"]): int(event.fields["step"])
        for event in events
        if event.kind == "step"
        for group in event.fields["groups"]
    }
    arrows = Arrows()
    yield from arrows.steps(_trainer(tracks, noted.trainer))
    for name, rows in sorted(noted.engines.items()):
        bars = [
            Bar(f"version {r['version']}", r["at"], _parts(r["parts"]), category="engines")
            for r in rows
        ]
        yield from tracks.bars("engines", name, bars)
    for name, rows in sorted(noted.shards.items()):
        bars = [_trajectory(row, trained) for row in rows]
        yield from arrows.trajectories(tracks.bars(name, "trajectories", bars))
    yield from arrows.drawn(trained)


def _job(tracks: Tracks, events: Sequence[RunEvent]) -> Iterator[Event]:
    """The phases of the job."""
    found = [event for event in events if event.kind == "phase"]
    last_ms = events[-1].ms if events else 0
    edges = [(e.ms, str(e.fields["phase"])) for e in found] + [(last_ms, "")]
    bars = [
        Bar(phase, ms / 1000, [(phase, max(0.0, after - ms))], {}, "job", Shape.WHOLE)
        for (ms, phase), (after, _) in pairwise(edges)
    ]
    yield from tracks.bars("job", "phase", bars)


def _gangs(tracks: Tracks, events: Sequence[RunEvent]) -> Iterator[Event]:
    """A track for each worker: who is there, in which role and tier; and moves, with reasons."""
    if not events:
        return
    start_ms = events[0].ms
    timeline = WorkerTimeline.of(events)
    tids: dict[str, int] = {}
    process, named = tracks.process("gangs")
    yield from named
    for worker in timeline.rows:
        tids[worker] = process.threads + 1
        bars = [
            Bar(
                span.role if span.state == "ready" else f"{span.role} ({span.state})",
                start_ms / 1000 + span.start,
                [(span.role, 1000 * (span.end - span.start))],
                {"resident": span.resident, "job": span.job, "why": span.why},
                "gangs",
                Shape.WHOLE,
            )
            for span in timeline.spans
            if worker in span.workers
        ]
        yield from tracks.bars("gangs", worker, bars)
    for mark in timeline.moves:
        at_s = start_ms / 1000 + mark.at
        for worker in mark.workers or ("",):
            args = {"reason": mark.text}
            yield from tracks.instant("gangs", tids.get(worker, 0), "move", at_s, args)


def _trainer(tracks: Tracks, rows: Sequence[Row]) -> Iterator[Event]:
    steps = [row for row in rows if row["kind"] == "step"]
    told = [
        Bar(
            f"step {row['step']}",
            row["at"],
            [(PHASES.get(name, name), ms) for name, ms in _parts(row["parts"])],
            {"step": row["step"], "tokens": row["tokens"]},
            "trainer",
        )
        for row in steps
    ]
    yield from tracks.bars("trainer", "steps", told)
    intake = [
        Bar("intake", r["at"], _parts(r["intake"]), {"step": r["step"]}, "trainer", Shape.PARTS)
        for r in steps
    ]
    yield from tracks.bars("trainer", "pack", intake)
    rounds = [
        Bar("round", r["at"] + at / 1000, [("", ms)], {"step": r["step"]}, "trainer", Shape.WHOLE)
        for r in steps
        for at, ms in zip(r["rounds"][::2], r["rounds"][1::2], strict=True)
    ]
    yield from tracks.bars("trainer", "rounds", rounds)
    name, step = "checkpoint: write", "step"
    written = [
        Bar(name, r["at"], _parts(r["parts"]), {step: r[step]}, "trainer", Shape.WHOLE)
        for r in rows
        if r["kind"] == "checkpoint"
    ]
    yield from tracks.bars("trainer", "checkpoints", written)


def _trajectory(row: Row, trained: dict[int, int]) -> Bar:
    kind = "" if row["training"] else "evaluation "
    about = ("version", "prompt", "tokens", "ending", "reward")
    args = {"group": row["group"], "member": row["member"]} | {key: row[key] for key in about}
    if row["training"] and row["group"] in trained:
        args["trained in step"] = trained[row["group"]]
    name = f"{kind}{row['group'] % (1 << 20)}.{row['member']}"
    return Bar(name, row["at"], _parts(row["parts"]), args, "trajectory")


def _parts(flat: Sequence[Any]) -> list[Part]:
    return [(str(name), float(ms)) for name, ms in zip(flat[::2], flat[1::2], strict=True)]


ABOUT = {"name": "trained", "cat": "trained"}


class Arrows:
    """Sees the spans of a trace as they are made."""

    def __init__(self) -> None:
        self._steps: dict[int, Event] = {}
        self._whole: dict[int, Event] = {}  # by group, its trajectory that ended last

    def steps(self, events: Iterable[Event]) -> Iterator[Event]:
        """Passes the trainer's events on."""
        for event in events:
            if event["ph"] == "X" and event["name"] == f"step {event.get('args', {}).get('step')}":
                self._steps[event["args"]["step"]] = event
            yield event

    def trajectories(self, events: Iterable[Event]) -> Iterator[Event]:
        """Passes a shard's events on."""
        for event in events:
            if event["ph"] == "X" and "group" in event.get("args", {}):
                group = event["args"]["group"]
                before = self._whole.get(group)
                if before is None or _end(event) > _end(before):
                    self._whole[group] = event
            yield event

    def drawn(self, trained: Mapping[int, int]) -> Iterator[Event]:
        """The arrows; `trained` says by group which step took it."""
        for group, source in self._whole.items():
            step = self._steps.get(trained.get(group, -1))
            if step is None or _end(step) <= _end(source):
                continue  # clocks of hosts that differ, or a lineage that was abandoned
            where = {"id": group, "pid": source["pid"], "tid": source["tid"]}
            yield ABOUT | where | {"ph": "s", "ts": max(source["ts"], _end(source) - 1)}
            where = {"id": group, "pid": step["pid"], "tid": step["tid"]}
            yield ABOUT | where | {"ph": "f", "bp": "e", "ts": max(step["ts"], _end(source))}


def _end(span: Event) -> int:
    return int(span["ts"]) + int(span["dur"])
