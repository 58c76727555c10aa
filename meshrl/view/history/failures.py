"""What failed in a job's own code, from its events `failure`, as people read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshrl.common.state.events import Event

AGAIN_S = 20.0  # between two counts of what fails where no step comes
SHOWN = 4  # kinds in one line of counts

Key = tuple[str, str, bool]


@dataclass(frozen=True)
class FailureKind:
    """All failures of one kind at one place so far."""

    kind: str  # as in `reward raised`
    where: str  # the author's line; may be empty
    evaluation: bool
    text: str  # of the first
    fix: str = ""
    count: int = 0  # trajectories
    calls: int = 0  # calls that were given up

    @property
    def key(self) -> Key:
        """What tells it from others."""
        return self.kind, self.where, self.evaluation


class Heard:
    """The failures of a run, by kind and place, as its events tell of them."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._found: dict[Key, FailureKind] = {}
        for event in events:
            self.hear(event)

    def hear(self, event: Event) -> None:
        """Takes in an event; those that tell of no failure change nothing."""
        if event.kind != "failure":
            return
        f = event.fields
        new = FailureKind(f["kind"], f["where"], bool(f["evaluation"]), f["text"], f.get("fix", ""))
        old = self._found.get(new.key, new)
        more = replace(old, count=old.count + f["count"], calls=old.calls + f["calls"])
        self._found[new.key] = more

    @property
    def all(self) -> tuple[FailureKind, ...]:
        """In the order in which they first came."""
        return tuple(self._found.values())


class ShownFailures:
    """Which failures have been shown: each at first with its text, then by its number."""

    def __init__(self) -> None:
        self._shown: dict[Key, tuple[int, int]] = {}
        self._counted_s = 0.0

    def news(self, failures: Sequence[FailureKind], stepped: bool, elapsed_s: float) -> list[str]:
        """Lines for what nobody has seen yet; counts come with each step, or after AGAIN_S."""
        fresh = [f for f in failures if f.key not in self._shown]
        lines = [first(f) for f in fresh]
        before = {f: self._shown.get(f.key, (f.count, f.calls)) for f in failures}
        grown = [f for f in failures if before[f][0] < f.count]
        grown += [f for f in failures if f not in grown and before[f][1] < f.calls]
        if grown and (stepped or elapsed_s - self._counted_s >= AGAIN_S):
            lines.append(counts(grown))
            self._counted_s = elapsed_s
            fresh += grown
        self._shown |= {f.key: (f.count, f.calls) for f in fresh}
        return lines


def first(failure: FailureKind) -> str:
    """The first of a kind: what, where, and what to do."""
    where = f" at {failure.where}" if failure.where else ""
    during = " in evaluation" if failure.evaluation else ""
    fix = f". {failure.fix[0].upper()}{failure.fix[1:]}" if failure.fix else ""
    return f"{failure.kind}{during}{where}: {failure.text}{fix}"


def counts(failures: Sequence[FailureKind]) -> str:
    """`failed so far: reward raised 40 (digits.py:12 in reward())`, most first."""
    ranked = sorted(failures, key=lambda f: (-f.count, -f.calls))
    more = f", and {len(ranked) - SHOWN} more kinds" if len(ranked) > SHOWN else ""
    return "failed so far: " + ", ".join(map(counted, ranked[:SHOWN])) + more


def counted(failure: FailureKind) -> str:
    """A kind with its numbers."""
    where = f" ({failure.where})" if failure.where else ""
    during = " in evaluation" if failure.evaluation else ""
    calls = f", {failure.calls} calls given up" if failure.calls else ""
    return f"{failure.kind}{during} {failure.count}{calls}{where}"


def listed(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Kinds, places, texts and counts for `summary.json`, most first."""
    return [asdict(f) for f in sorted(Heard(events).all, key=lambda f: -f.count)]


def of_share(share: float | None) -> str:
    """What is said behind a figure that not all of its samples have a say in: ` of 40 %`."""
    if share is None or share >= 1.0:
        return ""
    percent = 100 * share
    return f" of {percent:.0f} %" if 1 <= percent <= 99 else f" of {percent:.1f} %"


def named_figures(figures: Mapping[str, float], shares: Mapping[str, float]) -> str:
    """Figures by name in a line, each with the share of its samples that it is of."""
    return ", ".join(f"{n} {value:.3f}{of_share(shares.get(n))}" for n, value in figures.items())


def lost(shares: Mapping[str, float], reasons: Mapping[str, int]) -> str:
    """Why an evaluation, or a part of it, has no figure; empty when all have one."""
    names = [name for name, share in shares.items() if not share]
    if not names:
        return ""
    why = ", ".join(f"{kind} {n}" for kind, n in reasons.items())
    return f"{', '.join(names)}: no sample was scored" + (f" ({why})" if why else "")
