"""What a run's trace shows: its gangs, its trainer's steps, its engines' weights, its trajectories,
and which step took which of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.state.events import Event as RunEvent
from meshrl.view.history import gangs
from meshrl.view.trace.arrows import Arrows
from meshrl.view.trace.tracks import Bar, Event, Part, Shape, Tracks

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
    arrows, trained = Arrows(), _trained(events)
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
    spans = gangs.spans(events, start_ms, (events[-1].ms - start_ms) / 1000)
    tids: dict[str, int] = {}
    process, named = tracks.process("gangs")
    yield from named
    for worker in gangs.rows(spans):
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
            for span in spans
            if worker in span.workers
        ]
        yield from tracks.bars("gangs", worker, bars)
    for mark in gangs.moves(events, start_ms):
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


def _trained(events: Sequence[RunEvent]) -> dict[int, int]:
    """By group, the step that trained it last: an abandoned one may have done so before."""
    return {
        int(group["group"]): int(event.fields["step"])
        for event in events
        if event.kind == "step"
        for group in event.fields["groups"]
    }


def _parts(flat: Sequence[Any]) -> list[Part]:
    return [(str(name), float(ms)) for name, ms in zip(flat[::2], flat[1::2], strict=True)]


def name_of(path: Path) -> tuple[str, str]:
    """The kind of process that has noted a file, and its name: `shard`, `0`."""
    stem = path.name.removesuffix(".jsonl").removesuffix(".older")
    kind, _, name = stem.partition("-")
    return kind, name
