"""`meshrl trace`: reads what a run's processes have noted, also while it goes on, and writes a
trace.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TextIO

from common.base.errors import NotFound
from common.base.files import documents
from common.base.files.lines import whole
from common.state.events import Event
from meshrl.directory.places import shown
from meshrl.view.recording.recorded import read_events
from meshrl.view.trace.drawing import Row, TraceNotes, drawn, name_of
from meshrl.view.trace.tracks import Event as TraceEvent

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


def write(run_dir: Path, path: Path, events: list[Event]) -> int:
    """Writes a run's trace, whole or not at all; how many events it has. OSError."""
    beside = documents.in_the_making(path)
    try:
        with open(beside, "w", encoding="utf-8", opener=_for_this_user) as file:
            count = _written(file, drawn(noted(run_dir), events))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return count


def _written(file: TextIO, events: Iterator[TraceEvent]) -> int:
    """Some at a time: all of them take some hundred MB, and each by itself three times as long."""
    count = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    while batch := list(islice(events, BATCH)):
        text = json.dumps(batch, separators=(",", ":"))
        file.write((",\n" if count else "\n") + text[1:-1])
        count += len(batch)
    file.write("\n]}\n")
    return count


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def noted(run_dir: Path) -> TraceNotes:
    """What the processes of a run have noted; lines that are torn or damaged are left out."""
    found = TraceNotes()
    for path in sorted((run_dir / FOLDER).glob("*.jsonl"), key=_age):
        kind, name = name_of(path)
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


def _age(path: Path) -> tuple[str, bool]:
    """Sorts a file behind the one that it has followed."""
    kind, name = name_of(path)
    return f"{kind}-{name}", not path.name.endswith(".older.jsonl")
