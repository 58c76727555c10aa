"""Timeline of instances on workers, and of moves with reasons, from the events of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.planner_reports import MOVE_OUTCOME_EVENT, decode_move_outcome
from meshrl.common.state.pool.workers.rows import InstancePhase, Role, Tier
from meshrl.view.history.decisions import extract_decisions, format_figures
from meshrl.view.history.event_text import format_event, is_unexpected_exit
from meshrl.view.history.move_outcomes import format_seconds

LEAVING = "leaving"
LEAVING_SHOWN_S = 10.0  # display time of a removed instance if no event reports its end
# Fields of a move's event other than its reason.
_MOVE_FIELDS = frozenset(
    ("gang", "resident", "job", "from", "to", "started_ms", "finished_ms", "undone", "others")
) | {"policy", "rule", "reason", "pinned", "from_job", "token", "op"}


@dataclass(frozen=True)
class RoleSpan:
    """Period of an instance in one state, in seconds from the run's start."""

    worker_names: str  # the worker, or the workers, that it is on
    role: str
    state: str
    start_s: float
    end_s: float
    instance: str = ""
    job: str = ""
    reason: str = ""  # the planner's last decision about it: the rule, and its figures

    @property
    def workers(self) -> list[str]:
        """Workers of the instance; its gang where no decision names them."""
        return self.worker_names.split(" ")

    @property
    def summary(self) -> str:
        """Span as one line."""
        of = f" of {self.job}" if self.job else ""
        who = f"{self.instance}: " if self.instance else ""
        text = (
            f"{self.worker_names}: {who}{self.role}{of} ({self.state}), "
            f"{self.start_s:.1f}-{self.end_s:.1f} s"
        )
        return f"{text}; {self.reason}" if self.reason else text


@dataclass(frozen=True)
class TimelineMark:
    """Event at a moment, for some workers (none: for all)."""

    at_s: float  # seconds from the run's start
    text: str
    workers: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerTimeline:
    """Timeline of a run's workers; the run has lasted `end_s` seconds."""

    spans: Sequence[RoleSpan]
    moves: Sequence[TimelineMark]
    faults: Sequence[TimelineMark]  # processes that ended unexpectedly
    end_s: float

    @classmethod
    def from_events(cls, events: Sequence[Event]) -> WorkerTimeline:
        """Return the timeline of a run whose events are in order."""
        start_ms = events[0].ms if events else 0
        end = (events[-1].ms - start_ms) / 1000 if events else 1.0
        faults = [
            TimelineMark((e.ms - start_ms) / 1000, format_event(e))
            for e in events
            if is_unexpected_exit(e)
        ]
        return cls(build_spans(events, start_ms, end), list_moves(events, start_ms), faults, end)

    @property
    def list_workers(self) -> list[str]:
        """Workers that spans are on, in the order of their numbers."""
        return sorted(
            {worker for span in self.spans for worker in span.workers}, key=make_natural_key
        )


def build_spans(events: Iterable[Event], start_ms: int, end_s: float) -> list[RoleSpan]:
    """Return the spans of the job's instances, as workers reported them.

    For an instance that the planner removed, which no process reports, the span covers its leaving.
    """
    seats = _SpanBuilder(end_s)
    for event in events:
        seats.add_event(event, (event.ms - start_ms) / 1000)
    return seats.closed + list(seats.open_spans.values())


class _SpanBuilder:
    """Builder of spans, event by event."""

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s
        self.closed: list[RoleSpan] = []
        self.open_spans: dict[str, RoleSpan] = {}  # by instance
        self._workers: dict[str, str] = {}  # workers by instance, as displayed
        self._reasons: dict[str, str] = {}
        self._gangs: dict[str, str] = {}  # gang by instance

    def add_event(self, event: Event, at_s: float) -> None:
        fields = event.fields
        if event.kind == "desired":
            self._on_desired(event, at_s)
        elif event.kind == "actual":
            self._on_report(fields, at_s)
        elif event.kind == "lost":
            worker = str(fields["worker"])
            self._close_spans(
                [r for r, span in self.open_spans.items() if worker in span.workers], at_s
            )
        elif event.kind == "gang" and fields.get("dissolved"):
            self._close_spans(
                [r for r in self.open_spans if self._gangs.get(r) == fields["gang"]], at_s
            )

    def _on_desired(self, event: Event, at_s: float) -> None:
        fields = event.fields
        resident = str(fields["resident"])
        self._workers.setdefault(resident, " ".join(fields["workers"]))
        self._gangs[resident] = str(fields["gang"])
        self._reasons[resident] = next(extract_decisions([event])).summary
        before = self.open_spans.get(resident)
        if before is not None and fields["role"] == Role.IDLE:
            self._close_spans([resident], at_s)
            until, why = min(self._end_s, at_s + LEAVING_SHOWN_S), self._reasons[resident]
            leaving_span = replace(before, state=LEAVING, start_s=at_s, end_s=until, reason=why)
            self.open_spans[resident] = leaving_span

    def _on_report(self, fields: Mapping[str, Any], at_s: float) -> None:
        resident, state = str(fields["resident"]), str(fields.get("status", ""))
        row = self._workers.get(resident, str(fields["gang"]))
        here = set(row.split(" "))
        followed = [
            other
            for other, span in self.open_spans.items()
            if other == resident or (span.state == LEAVING and here & set(span.workers))
        ]
        self._close_spans(followed, at_s)
        if fields["role"] != Role.IDLE and state != InstancePhase.GONE:
            asleep = fields["tier"] != Tier.ACCELERATOR
            state = f"{state}, {fields['tier']}" if asleep else state
            about = resident, str(fields.get("job", "")), self._reasons.get(resident, "")
            role = str(fields["role"])
            self.open_spans[resident] = RoleSpan(row, role, state, at_s, self._end_s, *about)

    def _close_spans(self, instances: Sequence[str], at_s: float) -> None:
        for resident in instances:
            span = self.open_spans.pop(resident)
            self.closed.append(replace(span, end_s=min(span.end_s, at_s)))


def list_moves(events: Iterable[Event], start_ms: int) -> list[TimelineMark]:
    """Return moves that ended, were judged or were rejected, with reasons and figures."""
    found: list[TimelineMark] = []
    workers: dict[str, tuple[str, ...]] = {}
    for event in events:
        fields, at = event.fields, (event.ms - start_ms) / 1000
        if event.kind == "desired":
            workers.setdefault(str(fields["resident"]), tuple(fields["workers"]))
        text = describe_move(event)
        if text:
            found.append(TimelineMark(at, text, workers.get(str(fields.get("resident")), ())))
    return found


def describe_move(event: Event) -> str:
    """Return the reason and outcome of a move; empty for other events."""
    fields = event.fields
    if event.kind == "move":
        took_s = (event.ms - float(fields["started_ms"])) / 1000 if "started_ms" in fields else 0.0
        why = format_figures({k: v for k, v in fields.items() if k not in _MOVE_FIELDS}, limit=12)
        rule = fields.get("reason") or fields.get("policy", "")
        return f"{format_event(event)}; it took {took_s:.1f} s; {rule}" + (
            f" ({why})" if why else ""
        )
    if event.kind == "move_declined":
        return format_event(event)
    if event.kind == MOVE_OUTCOME_EVENT:
        move = decode_move_outcome(event.ms, fields)
        return (
            f"{format_event(event)}; {format_seconds(move.before_s)} before, regret "
            f"{format_seconds(move.regret_s)}"
        )
    return ""


def make_natural_key(name: str) -> tuple[str, int, str]:
    """Return a sort key by which `w10` follows `w9`."""
    digits = name[len(name.rstrip("0123456789")) :]
    return name[: len(name) - len(digits)], int(digits or 0), name
