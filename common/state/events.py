"""Event stream of a mesh: what has happened, in order.

The stream is trimmed below its readers' cursors (`readers`). A reader from further back gets
HistoryLost. `docs/operate/monitoring.md` lists the kinds of events.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, Generic

from typing_extensions import TypeVar

from meshrl.common.base.errors import HistoryLost
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import EVENTS, MESH_PREFIX, TRIMMED_KEY

Fields = TypeVar("Fields", default=dict[str, Any])  # of a kind

PAGE_EVENTS = 1000  # of one answer


@dataclass(frozen=True)
class Event(Generic[Fields]):
    """Event; `id` orders events and is a cursor of `read_page`, `ms` is the server's time."""

    id: str
    ms: int
    kind: str
    fields: Fields = field(default_factory=dict)  # type: ignore[assignment]


async def append(
    state: StateClient, kind: str, fields: dict[str, Any], op_id: str = "", *, after_id: str = ""
) -> None:
    """Append an event, once even if the command is sent twice, and once for an `op_id`.

    The new id is above `after_id`, an id that was seen of a Redis that is older now, regardless of
    any clock.
    """
    args: dict[str, Any] = {"op": op_id or uuid.uuid4().hex, "kind": kind}
    args |= {"fields": json.dumps(fields)} | (
        {"above": parse_event_id(after_id)[0]} if after_id else {}
    )
    await state.run_script("append", [MESH_PREFIX], args)


async def append_fenced_event(
    state: StateClient, name: str, token: int, kind: str, fields: dict[str, Any], op_id: str
) -> None:
    """Append an event, once for an operation; Fenced without the live lease (name, token)."""
    args = {"op": op_id, "kind": kind, "fields": json.dumps(fields), "name": name, "token": token}
    await state.run_mesh_script("append", **args)


async def read_page(state: StateClient, since: str = "0", count: int = PAGE_EVENTS) -> list[Event]:
    """Return up to `count` events after the one whose id is `since`, oldest first.

    HistoryLost if some of them are gone.
    """
    # Read the event at the cursor too: while it is there, no later event is gone.
    first = since if since != "0" else "-"
    rows = await state.run_command("XRANGE", EVENTS, first, "+", "COUNT", count + 1) or []
    if rows and rows[0][0] == since:
        return [_decode_event(row) for row in rows[1:]]
    await _check_no_gap(state, since)
    return [_decode_event(row) for row in rows[:count]]


async def read_all(state: StateClient, since: str = "0") -> list[Event]:
    """Return all events after `since`, read page by page. HistoryLost as from `read_page`."""
    found: list[Event] = []
    while page := await read_page(state, found[-1].id if found else since):
        found += page
    return found


async def read_remaining(state: StateClient, since: str = "0") -> list[Event]:
    """Return all events after `since` that are still there, though earlier ones may be gone."""
    while True:
        try:
            return await read_all(state, since)
        except HistoryLost as lost:  # trimmed, perhaps more than once
            since = lost.through


async def read_between(state: StateClient, since: str, until: str) -> list[Event]:
    """Return the events after `since` and up to `until` that have not been trimmed."""
    found: list[Event] = []
    while True:
        rows = (
            await state.run_command("XRANGE", EVENTS, f"({since}", until, "COUNT", PAGE_EVENTS)
            or []
        )
        found += map(_decode_event, rows)
        if len(rows) < PAGE_EVENTS:
            return found
        since = found[-1].id


async def read_last_id(state: StateClient) -> str:
    """Return the id of the last event; "0" if there is none."""
    rows = await state.run_command("XREVRANGE", EVENTS, "+", "-", "COUNT", 1)
    return str(rows[0][0]) if rows else "0"


def parse_event_id(event_id: str) -> tuple[int, int]:
    """Return the sort key of an event id."""
    ms, _, number = event_id.partition("-")
    return int(ms), int(number or 0)


async def _check_no_gap(state: StateClient, since: str) -> None:
    through = str(await state.run_command("GET", TRIMMED_KEY) or "0")
    if parse_event_id(since) < parse_event_id(through):
        raise HistoryLost(
            f"history_lost: events after {since} up to {through} are lost",
            where="the event stream",
            fix="See events.jsonl of the run for the recorded events",
            since=since,
            through=through,
        )


def _decode_event(row: Any) -> Event:
    event_id, flat = row
    values = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    fields = json.loads(values["fields"]) | json.loads(values["extra"])
    return Event(event_id, int(event_id.split("-")[0]), values["kind"], fields)
