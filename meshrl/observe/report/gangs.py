"""Who was on which worker when, which gangs moved and why, from the events of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.pool.rows import Doing, Role, Tier
from common.state.events import Event
from meshrl.observe.live.watch import told
from meshrl.observe.report.decided import decisions, figures

JUDGED = "move_judged"  # what a move has come to, some steps after it
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
class Mark:
    """Something that happened at a moment, to some workers (none: to all)."""

    at: float  # seconds from the run's start
    text: str
    workers: tuple[str, ...] = ()


def spans(events: Iterable[Event], start_ms: int, end: float) -> list[Span]:
    """What each of the job's residents did over time, as workers reported."""
    found: list[Span] = []
    current: dict[str, Span] = {}
    workers: dict[str, str] = {}  # of a resident, as they are shown
    why: dict[str, str] = {}
    for event in events:
        fields, at = event.fields, (event.ms - start_ms) / 1000
        if event.kind == "desired":
            workers.setdefault(str(fields["resident"]), " ".join(fields["workers"]))
            why |= {str(fields["resident"]): decision.text for decision in decisions([event])}
        if event.kind == "lost":
            row = str(fields["worker"])
            ended = [key for key, span in current.items() if row in span.workers]
        elif event.kind == "actual":
            ended = [key for key in current if key == fields["resident"]]
        else:
            continue
        found += [replace(current.pop(key), end=at) for key in ended]
        state = str(fields.get("status", ""))
        if event.kind == "actual" and fields["role"] != Role.IDLE and state != Doing.GONE:
            resident = str(fields["resident"])
            row = workers.get(resident, str(fields["gang"]))
            asleep = fields["tier"] != Tier.ACCELERATOR
            state = f"{state}, {fields['tier']}" if asleep else state
            about = resident, str(fields.get("job", "")), why.get(resident, "")
            current[resident] = Span(row, str(fields["role"]), state, at, end, *about)
    return found + list(current.values())


def moves(events: Iterable[Event], start_ms: int) -> list[Mark]:
    """The moves that ended, well or not, and those that were judged or declined; each with its
    reason and its figures.
    """
    found: list[Mark] = []
    workers: dict[str, tuple[str, ...]] = {}
    for event in events:
        fields, at = event.fields, (event.ms - start_ms) / 1000
        if event.kind == "desired":
            workers.setdefault(str(fields["resident"]), tuple(fields["workers"]))
        text = reason(event)
        if text:
            found.append(Mark(at, text, workers.get(str(fields.get("resident")), ())))
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
        return f"{what(fields)}: {_came_to(fields)}"
    return ""


def what(fields: Mapping[str, Any]) -> str:
    """A judged move in a few words."""
    return f"{fields['resident']} from {fields['from']} to {fields['to']}"


def _came_to(fields: Mapping[str, Any]) -> str:
    seconds = ("before", "predicted", "observed", "expected", "regret")
    said = [f"{name} {float(fields[f'{name}_s']):.2f} s" for name in seconds if _has(fields, name)]
    return f"{verdict(fields)} ({', '.join(said)} a step)"


def _has(fields: Mapping[str, Any], name: str) -> bool:
    return fields.get(f"{name}_s") is not None


def verdict(fields: Mapping[str, Any]) -> str:
    """Whether a judged move has paid."""
    paid = "it paid" if fields.get("paid") else "it did not pay"
    return f"{paid}, and was undone" if fields.get("undone") else paid


def judged(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The fields of the moves that were judged, in their order."""
    return [event.fields for event in events if event.kind == JUDGED]


def rows(found: Sequence[Span]) -> list[str]:
    """The workers that spans are on, in the order of their numbers."""
    return sorted({worker for span in found for worker in span.workers}, key=by_number)


def by_number(name: str) -> tuple[str, int, str]:
    """A key by which `w10` follows `w9`."""
    digits = name[len(name.rstrip("0123456789")) :]
    return name[: len(name) - len(digits)], int(digits or 0), name
