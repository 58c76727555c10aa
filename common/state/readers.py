"""Cursors of those who read the event stream, and what they allow to be trimmed.

A reader whose cursor is on record finds everything after it. It stays on record until the reader
leaves, or has been silent for GONE_MS while the mesh was up, or is behind when there are MOST
events. Who comes later than that gets HistoryLost from `events.read`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from meshrl.common.base.errors import HistoryLost
from meshrl.common.state.jobs import COUNT_FIELDS
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import READERS

RETENTION_MS = (
    120_000  # what has just happened stays: a kernel writes a file's bytes to disk in 30 s
)
SILENT_READER_MS = 3_600_000  # a full disk under a run is mended in less, or nobody looks after it
MAX_EVENTS = 1_000_000  # events: some 300 MB of Redis


@dataclass(frozen=True)
class EventReader:
    """Who reads the stream, where it runs, and up to where it has read."""

    name: str
    at: str  # id of the last event that it needs no more
    where: str
    since_ms: int
    seen_ms: int  # when it said so last
    left: bool = False  # it has gone: the stream is not held for it


def recorder_name(job: str) -> str:
    """The reader that writes down a job's events. It is on record from the job's submission on."""
    return f"recorder/{job}"


async def join(state: StateClient, name: str, cursor: str, location: str) -> str:
    """Puts a reader on record that has read up to `cursor` ("0": nothing); where it goes on.

    That is after `cursor` where nothing that it reads for has happened in between: a recorder need
    not know what a mesh did before its job.
    """
    return str(
        (await state.run_mesh_script("join_reader", name=name, at=cursor, where=location))["from"]
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
    """Says that the reader has everything up to `cursor` where no crash takes it back (and the rows
    of its job's steps up to `step`), and with `has_left` that it reads no more.
    """
    await state.run_mesh_script(
        "note_reader", name=name, at=cursor, where=location, step=step, left=has_left
    )


async def record_history_loss(
    state: StateClient, job: str, location: str, lost: HistoryLost
) -> str:
    """Tells, for who records a job, that events are gone, as the event `history_lost` with what the
    account of trajectories goes on from; where the recorder goes on.
    """
    answer = await state.run_job_script(
        "history_lost",
        job,
        name=recorder_name(job),
        where=location,
        since=lost.since,
        through=lost.through,
        counts=list(COUNT_FIELDS),
    )
    return str(answer["from"])


async def list_readers(state: StateClient) -> list[EventReader]:
    """All readers on record, by name, those that have left among them."""
    row = (await state.run_mesh_script("row", key=READERS))["row"] or {}
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
    """Frees the events that every reader has read, and rows of steps that are recorded and that no
    replay needs, but for those of the last `retention_ms`; how many events.

    `up_since_ms` is when the mesh began: readers could not say anything before. The event at a
    cursor stays, so that its reader sees at once that nothing is missing.
    """
    args = {
        "up_since_ms": up_since_ms,
        "keep_ms": retention_ms,
        "gone_ms": silent_ms,
        "most": max_events,
    }
    return int((await state.run_mesh_script("trim_events", **args))["trimmed"])
