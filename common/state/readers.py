"""Cursors of readers of the event stream, and trimming of the stream.

A reader whose cursor is on record finds every event after it. The record ends when the reader
leaves, has been silent for SILENT_READER_MS while the mesh was up, or is behind when there are
MAX_EVENTS events. A reader without a record may get HistoryLost from `events.read_page`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from meshrl.common.base.errors import HistoryLost
from meshrl.common.state.jobs import COUNT_FIELDS
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import READERS

RETENTION_MS = 120_000  # recent events stay: a kernel writes a file's bytes to disk within 30 s
SILENT_READER_MS = 3_600_000  # enough time to repair a full disk of an attended run
MAX_EVENTS = 1_000_000  # about 300 MB of Redis


@dataclass(frozen=True)
class EventReader:
    """Reader of the stream, its location, and its cursor."""

    name: str
    cursor: str  # id of the last event that it does not need any more
    location: str
    joined_ms: int
    last_seen_ms: int  # time of its last report
    has_left: bool = False  # it has left: its cursor does not block trimming


def recorder_name(job: str) -> str:
    """Return the reader that records a job's events.

    It is on record from the job's submission on.
    """
    return f"recorder/{job}"


async def join(state: StateClient, name: str, cursor: str, location: str) -> str:
    """Record a reader that has read up to `cursor` ("0": nothing) and return where it continues.

    The returned cursor may be later if nothing that concerns the reader has happened in between: a
    recorder does not need what a mesh did before its job.
    """
    return str(
        (await state.run_mesh_script("join_reader", name=name, cursor=cursor, location=location))[
            "from"
        ]
    )


async def record_cursor(
    state: StateClient,
    name: str,
    cursor: str,
    location: str,
    *,
    step: int = 0,
    has_left: bool = False,
) -> None:
    """Record that the reader has durably stored every event up to `cursor`.

    It has also stored the rows of its job's steps up to `step`. `has_left`: it reads no more.
    """
    await state.run_mesh_script(
        "record_cursor", name=name, cursor=cursor, location=location, step=step, has_left=has_left
    )


async def record_history_loss(
    state: StateClient, job: str, location: str, lost: HistoryLost
) -> str:
    """Record for a job's recorder that events are lost, and return where the recorder continues.

    The event `history_lost` has the counts from which the account of trajectories continues.
    """
    answer = await state.run_job_script(
        "record_history_loss",
        job,
        name=recorder_name(job),
        location=location,
        since=lost.since,
        through=lost.through,
        counts=list(COUNT_FIELDS),
    )
    return str(answer["from"])


async def list_readers(state: StateClient) -> list[EventReader]:
    """Return all readers on record, by name, including those that have left."""
    row = (await state.run_mesh_script("read_row", key=READERS))["row"] or {}
    names = EventReader.__dataclass_fields__
    found = [
        EventReader(name, **{key: value for key, value in json.loads(text).items() if key in names})
        for name, text in row.items()
    ]
    return sorted(found, key=lambda reader: reader.name)


async def trim_events(
    state: StateClient,
    up_since_ms: int,
    *,
    retention_ms: int = RETENTION_MS,
    silent_ms: int = SILENT_READER_MS,
    max_events: int = MAX_EVENTS,
) -> int:
    """Trim the events that every reader has read; return how many.

    Also remove rows of steps that are recorded and that no replay needs. All of the last
    `retention_ms` stay. `up_since_ms` is when the mesh began: readers could not report before. The
    event at a cursor stays, so that its reader can detect that nothing is missing.
    """
    args = {
        "up_since_ms": up_since_ms,
        "keep_ms": retention_ms,
        "gone_ms": silent_ms,
        "most": max_events,
    }
    return int((await state.run_mesh_script("trim_events", **args))["trimmed"])
