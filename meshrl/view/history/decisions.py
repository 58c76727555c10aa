"""What the planner has decided, from its events: what, by which rule, and from which figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from meshrl.common.state import events
from meshrl.common.state.events import Event
from meshrl.common.state.pool.workers.rows import Role, Tier
from meshrl.common.state.redis.client import State
from meshrl.view.history.held import ADMISSION

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

    def concerns(fields: dict[str, Any]) -> bool:
        if name in (fields.get(key) for key in _SUBJECTS) or name in (fields.get("workers") or ()):
            return True
        return any(name in str(service).split("/") for service in fields.get("services") or ())

    return [e for e in found if e.kind in KINDS and concerns(e.fields)][-MOST:]


def told(event: Event) -> str:
    """One decision on one line: when, what, by which rule, from which figures."""
    fields = dict(event.fields)
    at = datetime.fromtimestamp(event.ms / 1000).strftime("%H:%M:%S")
    if event.kind == "desired":
        wish = next(decisions([event]))
        return f"{at} {fields['job']}, {fields['resident']}: {wish.text}"
    rule = next((str(fields.pop(key)) for key in _RULES if fields.get(key)), "")
    said = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in fields.items()
        if key not in _PLUMBING and value is not False and value not in ("", None, [], {})
    )
    line = f"{at} {event.kind}" + (f", rule {rule}" if rule else "")
    return f"{line}: {said}" if said else line


# What a decision's event has beside the figures that decided it.
ABOUT = frozenset(
    ("gang", "resident", "job", "role", "core", "tier", "generation", "epoch", "reason", "pinned")
) | {"workers", "from_role", "from_job", "turns", "op", "ranks", "token", "held", "before", "rule"}
SHOWN = 6  # figures of one decision in a line


@dataclass(frozen=True)
class Decision:
    """One decision, with what it came from."""

    ms: int
    what: str  # "rollout on w1"
    rule: str
    inputs: Mapping[str, Any]

    @property
    def text(self) -> str:
        """It in a line."""
        said = figures(self.inputs)
        return f"{self.what}: {self.rule or 'no rule is given'}" + (f" ({said})" if said else "")


def figures(named: Mapping[str, Any], most: int = SHOWN) -> str:
    """Figures in a line, the first ones of many."""
    every = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in named.items()
    ]
    more = f", and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def decisions(events: Iterable[Event]) -> Iterator[Decision]:
    """Those among events, in their order."""
    for event in events:
        f = event.fields
        if event.kind == "desired":
            what, rule = _wish(f), f["reason"]
        elif event.kind == ADMISSION:
            what, rule = str(f["held"]) or "it runs", f["rule"]
        else:
            continue
        inputs = {k: v for k, v in f.items() if k not in ABOUT and v not in ("", None)}
        yield Decision(event.ms, what, str(rule), inputs)


def _wish(f: Mapping[str, Any]) -> str:
    """What is to be where."""
    on = ", ".join(f["workers"])
    if f["role"] == Role.IDLE:
        return f"{f.get('from_role') or 'what was there'} leaves {on}"
    role = "core" if f.get("core") else str(f["role"])
    tier = f["tier"]
    asleep = {Tier.ACCELERATOR: "", Tier.ABSENT: ", as a checkpoint"}.get(
        tier, f", asleep in {tier}"
    )
    return f"{role} on {on}{asleep}"
