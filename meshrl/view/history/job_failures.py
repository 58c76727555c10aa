"""Failures in a job's own code, from its `failure` events, formatted for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshrl.common.state.events import Event

COUNT_INTERVAL_S = 20.0  # between two counts of what fails where no step comes
MAX_KINDS = 4  # kinds in one line of counts

FailureKey = tuple[str, str, bool]


@dataclass(frozen=True)
class FailureKind:
    """Failures of one kind at one place so far."""

    kind: str  # as in `reward raised`
    where: str  # the author's line; may be empty
    evaluation: bool
    text: str  # text of the first failure
    fix: str = ""
    count: int = 0  # trajectories
    calls: int = 0  # calls that were given up

    @property
    def key(self) -> FailureKey:
        """Key that identifies the kind, place and evaluation."""
        return self.kind, self.where, self.evaluation


class FailureCounter:
    """Counter of a run's failures by kind and place, from its events."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._kinds: dict[FailureKey, FailureKind] = {}
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Count an event; events that report no failure change nothing."""
        if event.kind != "failure":
            return
        f = event.fields
        new = FailureKind(f["kind"], f["where"], bool(f["evaluation"]), f["text"], f.get("fix", ""))
        old = self._kinds.get(new.key, new)
        more = replace(old, count=old.count + f["count"], calls=old.calls + f["calls"])
        self._kinds[new.key] = more

    @property
    def kinds(self) -> tuple[FailureKind, ...]:
        """Kinds in the order of their first failure."""
        return tuple(self._kinds.values())


class FailurePrinter:
    """Printer of new failures: each at first with its text, then by its number."""

    def __init__(self) -> None:
        self._printed: dict[FailureKey, tuple[int, int]] = {}
        self._counted_s = 0.0

    def format_new(
        self, failures: Sequence[FailureKind], has_new_step: bool, elapsed_s: float
    ) -> list[str]:
        """Return lines for failures not shown so far; counts come with each step, or after
        `COUNT_INTERVAL_S`.
        """
        fresh = [f for f in failures if f.key not in self._printed]
        lines = [format_first(f) for f in fresh]
        before = {f: self._printed.get(f.key, (f.count, f.calls)) for f in failures}
        grown = [f for f in failures if before[f][0] < f.count]
        grown += [f for f in failures if f not in grown and before[f][1] < f.calls]
        if grown and (has_new_step or elapsed_s - self._counted_s >= COUNT_INTERVAL_S):
            lines.append(format_counts(grown))
            self._counted_s = elapsed_s
            fresh += grown
        self._printed |= {f.key: (f.count, f.calls) for f in fresh}
        return lines


def format_first(failure: FailureKind) -> str:
    """Return the first failure of a kind: what, where, and how to fix it."""
    where = f" at {failure.where}" if failure.where else ""
    during = " in evaluation" if failure.evaluation else ""
    fix = f". {failure.fix[0].upper()}{failure.fix[1:]}" if failure.fix else ""
    return f"{failure.kind}{during}{where}: {failure.text}{fix}"


def format_counts(failures: Sequence[FailureKind]) -> str:
    """Return `failed so far: reward raised 40 (digits.py:12 in reward())`, most first."""
    ranked = sorted(failures, key=lambda f: (-f.count, -f.calls))
    more = f", and {len(ranked) - MAX_KINDS} more kinds" if len(ranked) > MAX_KINDS else ""
    return "failed so far: " + ", ".join(map(format_count, ranked[:MAX_KINDS])) + more


def format_count(failure: FailureKind) -> str:
    """Return a kind with its counts."""
    where = f" ({failure.where})" if failure.where else ""
    during = " in evaluation" if failure.evaluation else ""
    calls = f", {failure.calls} calls abandoned" if failure.calls else ""
    return f"{failure.kind}{during} {failure.count}{calls}{where}"


def summarize_failures(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return kinds, places, texts and counts for `summary.json`, most first."""
    return [asdict(f) for f in sorted(FailureCounter(events).kinds, key=lambda f: -f.count)]


def format_share(share: float | None) -> str:
    """Return the suffix for a figure that covers only a share of its samples: ` of 40 %`."""
    if share is None or share >= 1.0:
        return ""
    percent = 100 * share
    return f" of {percent:.0f} %" if 1 <= percent <= 99 else f" of {percent:.1f} %"


def format_figures(figures: Mapping[str, float], shares: Mapping[str, float]) -> str:
    """Return figures by name in a line, each with the share of its samples that it covers."""
    return ", ".join(
        f"{n} {value:.3f}{format_share(shares.get(n))}" for n, value in figures.items()
    )


def explain_unscored(shares: Mapping[str, float], reasons: Mapping[str, int]) -> str:
    """Return why an evaluation, or a part of it, has no figure; empty when all have one."""
    names = [name for name, share in shares.items() if not share]
    if not names:
        return ""
    why = ", ".join(f"{kind} {n}" for kind, n in reasons.items())
    return f"{', '.join(names)}: no sample was scored" + (f" ({why})" if why else "")
