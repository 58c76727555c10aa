"""The event stream of a mesh: what has happened, in order. It is trimmed below its readers' cursors
(`readers`), and who reads from further back is told so.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from meshrl.common.base.errors import HistoryLost
from meshrl.common.state.redis.client import State
from meshrl.common.state.redis.keys import EVENTS, MESH, TRIMMED

PAGE = 1000  # events of one answer


@dataclass(frozen=True)
class Event:
    """`id` orders events and is where `read` goes on; `ms` is the server's time."""

    id: str
    ms: int
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


async def append(
    state: State, kind: str, fields: dict[str, Any], op_id: str = "", *, above: str = ""
) -> None:
    """Adds an event, once even when the command is sent twice; with `op_id` once for whoever names
    it. Its id is `above` one that was seen of a Redis which is older now, whatever any clock says.
    """
    args: dict[str, Any] = {"op": op_id or uuid.uuid4().hex, "kind": kind}
    args |= {"fields": json.dumps(fields)} | ({"above": order(above)[0]} if above else {})
    await state.run("append", [MESH], args)


async def append_as(
    state: State, name: str, token: int, kind: str, fields: dict[str, Any], op_id: str
) -> None:
    """Adds an event, once for an operation; Fenced without the live lease (name, token)."""
    args = {"op": op_id, "kind": kind, "fields": json.dumps(fields), "name": name, "token": token}
    await state.run_mesh("append", **args)


async def read(state: State, since: str = "0", count: int = PAGE) -> list[Event]:
    """Up to `count` events after the one whose id is `since`, oldest first. HistoryLost when some
    of them are gone.
    """
    # The event at the cursor is asked for too: while it is there, nothing behind it is gone.
    first = since if since != "0" else "-"
    rows = await state.command("XRANGE", EVENTS, first, "+", "COUNT", count + 1) or []
    if rows and rows[0][0] == since:
        return [_event(row) for row in rows[1:]]
    await _refuse_a_gap(state, since)
    return [_event(row) for row in rows[:count]]


async def read_all(state: State, since: str = "0") -> list[Event]:
    """All events after `since`, page by page. HistoryLost as from `read`."""
    found: list[Event] = []
    while page := await read(state, found[-1].id if found else since):
        found += page
    return found


async def read_remaining(state: State, since: str = "0") -> list[Event]:
    """Return all events after `since` that are still there, though earlier ones may be gone."""
    while True:
        try:
            return await read_all(state, since)
        except HistoryLost as lost:  # trimmed, perhaps meanwhile again
            since = lost.through


async def left_between(state: State, since: str, until: str) -> list[Event]:
    """Return the events after `since` and up to `until` that have not been trimmed."""
    found: list[Event] = []
    while True:
        rows = await state.command("XRANGE", EVENTS, f"({since}", until, "COUNT", PAGE) or []
        found += map(_event, rows)
        if len(rows) < PAGE:
            return found
        since = found[-1].id


async def last_id(state: State) -> str:
    """The id of the last event; "0" when there is none."""
    rows = await state.command("XREVRANGE", EVENTS, "+", "-", "COUNT", 1)
    return str(rows[0][0]) if rows else "0"


def order(event_id: str) -> tuple[int, int]:
    """By what ids of events rise."""
    ms, _, number = event_id.partition("-")
    return int(ms), int(number or 0)


async def _refuse_a_gap(state: State, since: str) -> None:
    through = str(await state.command("GET", TRIMMED) or "0")
    if order(since) < order(through):
        raise HistoryLost(
            f"history_lost: events after {since} are gone up to {through}",
            where="the event stream",
            fix="What was recorded of them is in events.jsonl of the run",
            since=since,
            through=through,
        )


def _event(row: Any) -> Event:
    event_id, flat = row
    values = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    fields = json.loads(values["fields"]) | json.loads(values["extra"])
    return Event(event_id, int(event_id.split("-")[0]), values["kind"], fields)
