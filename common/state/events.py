"""The event stream of a mesh: what has happened, in order; nothing trims it."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from common.state.client import State
from common.state.keys import EVENTS, MESH


@dataclass(frozen=True)
class Event:
    """`id` orders events and is where `read` goes on; `ms` is the server's time."""

    id: str
    ms: int
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


async def append(state: State, kind: str, fields: dict[str, Any]) -> None:
    """Adds an event, once even when the command is sent twice."""
    args = {"op": uuid.uuid4().hex, "kind": kind, "fields": json.dumps(fields)}
    await state.run("append", [MESH], args)


async def append_as(
    state: State, name: str, token: int, kind: str, fields: dict[str, Any], op_id: str
) -> None:
    """Adds an event, once for an operation; Fenced without the live lease (name, token)."""
    args = {"op": op_id, "kind": kind, "fields": json.dumps(fields), "name": name, "token": token}
    await state.run("append", [MESH], args)


async def read(state: State, since: str = "0", count: int = 1000) -> list[Event]:
    """Up to `count` events after the one whose id is `since`, oldest first."""
    rows = await state.command(
        "XRANGE", EVENTS, f"({since}" if since != "0" else "-", "+", "COUNT", count
    )
    return [_event(row) for row in rows or []]


async def read_all(state: State, since: str = "0") -> list[Event]:
    """All events after `since`, page by page."""
    found: list[Event] = []
    while page := await read(state, found[-1].id if found else since):
        found += page
    return found


def _event(row: Any) -> Event:
    event_id, flat = row
    values = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    fields = json.loads(values["fields"]) | json.loads(values["extra"])
    return Event(event_id, int(event_id.split("-")[0]), values["kind"], fields)
