"""Who was on which worker when, which gangs moved and why, from the events of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.explained import JUDGED, judged_of
from meshrl.common.state.pool.workers.rows import Doing, Role, Tier
from meshrl.view.history.decisions import decisions, figures
from meshrl.view.history.moves import seconds
from meshrl.view.history.news import told, unforeseen

LEAVING = "leaving"
LEAVING_S = 10.0  # that a resident is shown which was removed, if nothing tells of its end
# What the event of a move has beside its reason.
_ABOUT = frozenset(
    ("gang", "resident", "job", "from", "to", "started_ms", "finished_ms", "undone", "others")
) | {"policy", "rule", "reason", "pinned", "from_job", "token", "op"}


@dataclass(frozen=True)
class Span:
    """A resident in one state from `start` to `end`, seconds from the run's start."""

    row: str  # the worker, or the workers, that it is on
    role: str
    state: str
    start: float
    end: float
    resident: str = ""
    job: str = ""
    why: str = ""  # what the planner decided of it last: the rule, and its figures

    @property
    def workers(self) -> list[str]:
        """Those that it is on; its gang where no decision tells them."""
        return self.row.split(" ")

    @property
    def text(self) -> str:
        """All of it in a line."""
        of = f" of {self.job}" if self.job else ""
        who = f"{self.resident}: " if self.resident else ""
        said = f"{self.row}: {who}{self.role}{of} ({self.state}), {self.start:.1f}-{self.end:.1f} s"
        return f"{said}; {self.why}" if self.why else said


@dataclass(frozen=True)
class TimelineMark:
    """Something that happened at a moment, to some workers (none: to all)."""

    at: float  # seconds from the run's start
    text: str
    workers: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerTimeline:
    """Everything that happened to the workers of a run that has lasted `end` seconds."""

    spans: Sequence[Span]
    moves: Sequence[TimelineMark]
    faults: Sequence[TimelineMark]  # processes that ended unasked
    end: float

    @classmethod
    def of(cls, events: Sequence[Event]) -> WorkerTimeline:
        """That of a run, whose events are in order."""
        start_ms = events[0].ms if events else 0
        end = (events[-1].ms - start_ms) / 1000 if events else 1.0
        faults = [TimelineMark((e.ms - start_ms) / 1000, told(e)) for e in events if unforeseen(e)]
        return cls(spans(events, start_ms, end), moves(events, start_ms), faults, end)

    @property
    def rows(self) -> list[str]:
        """The workers that spans are on, in the order of their numbers."""
        return sorted({worker for span in self.spans for worker in span.workers}, key=by_number)


def spans(events: Iterable[Event], start_ms: int, end: float) -> list[Span]:
    """What each of the job's residents did over time, as workers reported; and how long one took
    to leave that the planner removed, of which nobody reports.
    """
    seats = _Seats(end)
    for event in events:
        seats.see(event, (event.ms - start_ms) / 1000)
    return seats.found + list(seats.current.values())


class _Seats:
    """Who is where, event by event."""

    def __init__(self, end: float) -> None:
        self._end = end
        self.found: list[Span] = []
        self.current: dict[str, Span] = {}  # by resident
        self._workers: dict[str, str] = {}  # of a resident, as they are shown
        self._why: dict[str, str] = {}
        self._gang: dict[str, str] = {}  # of a resident

    def see(self, event: Event, at: float) -> None:
        fields = event.fields
        if event.kind == "desired":
            self._wished(event, at)
        elif event.kind == "actual":
            self._reported(fields, at)
        elif event.kind == "lost":
            worker = str(fields["worker"])
            self._over([r for r, span in self.current.items() if worker in span.workers], at)
        elif event.kind == "gang" and fields.get("dissolved"):
            self._over([r for r in self.current if self._gang.get(r) == fields["gang"]], at)

    def _wished(self, event: Event, at: float) -> None:
        fields = event.fields
        resident = str(fields["resident"])
        self._workers.setdefault(resident, " ".join(fields["workers"]))
        self._gang[resident] = str(fields["gang"])
        self._why[resident] = next(decisions([event])).text
        before = self.current.get(resident)
        if before is not None and fields["role"] == Role.IDLE:
            self._over([resident], at)
            until, why = min(self._end, at + LEAVING_S), self._why[resident]
            left = replace(before, state=LEAVING, start=at, end=until, why=why)
            self.current[resident] = left

    def _reported(self, fields: Mapping[str, Any], at: float) -> None:
        resident, state = str(fields["resident"]), str(fields.get("status", ""))
        row = self._workers.get(resident, str(fields["gang"]))
        here = set(row.split(" "))
        followed = [
            other
            for other, span in self.current.items()
            if other == resident or (span.state == LEAVING and here & set(span.workers))
        ]
        self._over(followed, at)
        if fields["role"] != Role.IDLE and state != Doing.GONE:
            asleep = fields["tier"] != Tier.ACCELERATOR
            state = f"{state}, {fields['tier']}" if asleep else state
            about = resident, str(fields.get("job", "")), self._why.get(resident, "")
            role = str(fields["role"])
            self.current[resident] = Span(row, role, state, at, self._end, *about)

    def _over(self, residents: Sequence[str], at: float) -> None:
        for resident in residents:
            span = self.current.pop(resident)
            self.found.append(replace(span, end=min(span.end, at)))


def moves(events: Iterable[Event], start_ms: int) -> list[TimelineMark]:
    """The moves that ended, well or not, and those that were judged or declined; each with its
    reason and its figures.
    """
    found: list[TimelineMark] = []
    workers: dict[str, tuple[str, ...]] = {}
    for event in events:
        fields, at = event.fields, (event.ms - start_ms) / 1000
        if event.kind == "desired":
            workers.setdefault(str(fields["resident"]), tuple(fields["workers"]))
        text = reason(event)
        if text:
            found.append(TimelineMark(at, text, workers.get(str(fields.get("resident")), ())))
    return found


def reason(event: Event) -> str:
    """Why there was a move, and what it came to; empty for events that tell of none."""
    fields = event.fields
    if event.kind == "move":
        took_s = (event.ms - float(fields["started_ms"])) / 1000 if "started_ms" in fields else 0.0
        why = figures({k: v for k, v in fields.items() if k not in _ABOUT}, most=12)
        rule = fields.get("reason") or fields.get("policy", "")
        return f"{told(event)}; it took {took_s:.1f} s; {rule}" + (f" ({why})" if why else "")
    if event.kind == "move_declined":
        return told(event)
    if event.kind == JUDGED:
        move = judged_of(event.ms, fields)
        return f"{told(event)}; {seconds(move.before_s)} before, regret {seconds(move.regret_s)}"
    return ""


def by_number(name: str) -> tuple[str, int, str]:
    """A key by which `w10` follows `w9`."""
    digits = name[len(name.rstrip("0123456789")) :]
    return name[: len(name) - len(digits)], int(digits or 0), name
