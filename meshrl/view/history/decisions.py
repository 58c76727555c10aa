"""What the planner has decided about a job, a gang or a worker, from the event stream."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from common.state import events
from common.state.events import Event
from common.state.redis.client import State
from meshrl.view.history import decided

KINDS = (
    *("desired", "admission", "gang", "move", "move_declined", "services", "lost"),
    *("host_lost", "host_back", "host_joined", "host_left", "host_marked", "drain_settled"),
)
MOST = 12  # decisions that are shown, the last ones
_SUBJECTS = ("job", "gang", "resident", "worker", "host")
_RULES = ("rule", "reason")
_PLUMBING = ("token", "op")  # who wrote it, and how often it may come
_PAGE = 5_000  # of the newest events, which are looked through


async def recent(state: State) -> list[Event]:
    """The newest events, oldest first."""
    return (await events.read_remaining(state))[-_PAGE:]


def about(found: Iterable[Event], subject: str) -> list[Event]:
    """The last decisions about `subject`: a job, a gang, a resident, a worker or a host."""
    name = subject.removeprefix("worker/")
    return [e for e in found if e.kind in KINDS and _concerns(e.fields, name)][-MOST:]


def _concerns(fields: dict[str, Any], name: str) -> bool:
    if name in (fields.get(key) for key in _SUBJECTS) or name in (fields.get("workers") or ()):
        return True
    return any(name in str(service).split("/") for service in fields.get("services") or ())


def told(event: Event) -> str:
    """One decision on one line: when, what, by which rule, from which figures."""
    fields = dict(event.fields)
    at = datetime.fromtimestamp(event.ms / 1000).strftime("%H:%M:%S")
    if event.kind == "desired":
        wish = next(decided.decisions([event]))
        return f"{at} {fields['job']}, {fields['resident']}: {wish.text}"
    rule = next((str(fields.pop(key)) for key in _RULES if fields.get(key)), "")
    said = {key: value for key, value in fields.items() if key not in _PLUMBING and _tells(value)}
    figures = ", ".join(f"{key} {_shown(value)}" for key, value in said.items())
    line = f"{at} {event.kind}" + (f", rule {rule}" if rule else "")
    return f"{line}: {figures}" if figures else line


def _tells(value: Any) -> bool:
    return value is not False and value not in ("", None, [], {})


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
