"""Decisions of the planner from its events: the action, its rule and its figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from meshrl.common.state import events
from meshrl.common.state.events import Event, parse_event_id
from meshrl.common.state.pool.workers.rows import Role, Tier
from meshrl.common.state.redis.client import StateClient
from meshrl.view.history.blocked_jobs import ADMISSION

DECISION_KINDS = (
    *("desired", "admission", "seeding", "gang", "move", "move_declined", "services", "lost"),
    *("place_settled", "place_declined"),
    *("host_lost", "host_back", "host_joined", "host_left", "host_marked", "drain_settled"),
)
MAX_DECISIONS = 12  # decisions that are shown, the last ones
_SUBJECTS = ("job", "gang", "resident", "worker", "host")
_RULES = ("rule", "reason")
_INTERNAL_FIELDS = ("token", "op")  # writer, and key against repetition
_MAX_EVENTS = 5_000  # newest events that are searched


async def read_recent(state: StateClient) -> list[Event]:
    """Return the newest events, oldest first."""
    return (await events.read_remaining(state))[-_MAX_EVENTS:]


def merge_events(*sources: Iterable[Event]) -> list[Event]:
    """Return events of several sources, each once, in their order."""
    found = {event.id: event for source in sources for event in source}
    return sorted(found.values(), key=lambda event: parse_event_id(event.id))


def select_decisions(candidates: Iterable[Event], subject: str) -> list[Event]:
    """Return the last decisions about `subject`: a job, a gang, an instance, a worker or a host."""
    name = subject.removeprefix("worker/")

    def concerns(fields: dict[str, Any]) -> bool:
        workers = fields.get("workers")  # of an event of a host that joins: their number
        if isinstance(workers, list) and name in workers:
            return True
        if name in (fields.get(key) for key in _SUBJECTS):
            return True
        return any(name in str(service).split("/") for service in fields.get("services") or ())

    return [e for e in candidates if e.kind in DECISION_KINDS and concerns(e.fields)][
        -MAX_DECISIONS:
    ]


def format_event(event: Event) -> str:
    """Return one decision as a line: time, action, rule and figures."""
    fields = dict(event.fields)
    at = datetime.fromtimestamp(event.ms / 1000).strftime("%H:%M:%S")
    if event.kind == "desired":
        decision = next(extract_decisions([event]))
        return f"{at} {fields['job']}, {fields['resident']}: {decision.summary}"
    rule = next((str(fields.pop(key)) for key in _RULES if fields.get(key)), "")
    text = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in fields.items()
        if key not in _INTERNAL_FIELDS and value is not False and value not in ("", None, [], {})
    )
    line = f"{at} {event.kind}" + (f", rule {rule}" if rule else "")
    return f"{line}: {text}" if text else line


# Fields of a decision's event other than the figures that decided it.
CONTEXT_FIELDS = frozenset(
    ("gang", "resident", "job", "role", "core", "tier", "generation", "epoch", "reason", "pinned")
) | {"workers", "from_role", "from_job", "turns", "op", "ranks", "token", "held", "before", "rule"}
MAX_FIGURES = 6  # figures of one decision in a line


@dataclass(frozen=True)
class PlannerDecision:
    """Decision of the planner with its inputs."""

    decided_ms: int
    action: str  # "rollout on w1"
    rule: str
    inputs: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """Decision as one line."""
        figures = format_figures(self.inputs)
        return f"{self.action}: {self.rule or 'no rule recorded'}" + (
            f" ({figures})" if figures else ""
        )


def format_figures(values: Mapping[str, Any], limit: int = MAX_FIGURES) -> str:
    """Return the first `limit` figures as a line."""
    every = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    ]
    more = f", and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def extract_decisions(events: Iterable[Event]) -> Iterator[PlannerDecision]:
    """Yield the decisions among events, in their order."""
    for event in events:
        f = event.fields
        if event.kind == "desired":
            what, rule = _describe_desired_role(f), f["reason"]
        elif event.kind == ADMISSION:
            what, rule = str(f["held"]) or "it runs", f["rule"]
        else:
            continue
        inputs = {k: v for k, v in f.items() if k not in CONTEXT_FIELDS and v not in ("", None)}
        yield PlannerDecision(event.ms, what, str(rule), inputs)


def _describe_desired_role(fields: Mapping[str, Any]) -> str:
    """Return a text of the desired role and its workers."""
    on = ", ".join(fields["workers"])
    if fields["role"] == Role.IDLE:
        return f"{fields.get('from_role') or 'the former role'} leaves {on}"
    role = "core" if fields.get("core") else str(fields["role"])
    tier = fields["tier"]
    asleep = {Tier.ACCELERATOR: "", Tier.ABSENT: ", as a checkpoint"}.get(
        tier, f", asleep in {tier}"
    )
    return f"{role} on {on}{asleep}"
