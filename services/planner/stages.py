"""The two stage times of a job, from the counters that its processes publish.

An engine that the staleness gate keeps half empty is not slow: its time counts by the share of its
slots that is in use, so that the stage time is that of full engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from services.planner.allocation import StageTimes

LEAST_STEPS = 2  # in the window, before its times are believed


@dataclass(frozen=True, slots=True)
class Counters:
    """Cumulative counters at one look; `sources` are the processes they come from."""

    sources: frozenset[str]
    engines: int
    occupied_s: float  # seconds that engines were occupied; half-empty ones count half
    groups: int
    train_busy_s: float
    steps: int


class Published(Protocol):
    """What the planner reads of a registry entry."""

    name: str
    kind: str
    incarnation: str
    stats: dict[str, Any]


def read(job: str, entries: Iterable[Published]) -> Counters:
    """The counters of a job's live processes, from their registry entries."""
    mine = [e for e in entries if e.stats.get("job") == job]
    engines = [e for e in mine if e.kind == "engine"]
    trainers = [e for e in mine if e.kind == "trainer"]
    shards = [e for e in mine if e.kind == "rollout"]
    return Counters(
        sources=frozenset(e.name + e.incarnation for e in engines + trainers + shards),
        engines=len(engines),
        occupied_s=sum(float(e.stats.get("occupied_s", 0.0)) for e in engines),
        groups=sum(int(e.stats.get("groups", 0)) for e in shards),
        train_busy_s=sum(float(e.stats.get("busy_s", 0.0)) for e in trainers),
        steps=sum(int(e.stats.get("step", 0)) for e in trainers),
    )


@dataclass(frozen=True, slots=True)
class StageWindow:
    """Differences of counters since the processes last changed."""

    groups_per_step: int
    first: Counters | None = None
    last: Counters | None = None

    def observed(self, counters: Counters) -> StageWindow:
        """The window after a look; other processes than before begin a new one."""
        first = self.first
        if first is None or first.sources != counters.sources:
            first = counters
        return replace(self, first=first, last=counters)

    def emptied(self) -> StageWindow:
        """A window of the same job that has seen nothing yet."""
        return StageWindow(self.groups_per_step)

    def times(self) -> StageTimes | None:
        """Seconds per step of each stage with these gangs; None until enough has been seen."""
        first, last = self.first, self.last
        if first is None or last is None or not last.engines:
            return None
        steps, groups = last.steps - first.steps, last.groups - first.groups
        if steps < LEAST_STEPS or groups < LEAST_STEPS * self.groups_per_step:
            return None
        busy = (last.occupied_s - first.occupied_s) / last.engines
        return StageTimes(
            rollout_s=busy / groups * self.groups_per_step,
            train_s=(last.train_busy_s - first.train_busy_s) / steps,
        )
