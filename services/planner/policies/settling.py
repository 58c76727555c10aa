"""The conditions under which stage times may move a resident: its job must have settled.

The job trains and its warm-up is over; every resident of it does what was wished last; the last
look at the stage times is an interval ago, and the last move `cooldown_steps`; and since the
processes last changed there were enough steps and groups to tell the times from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from common.pool.needs import Counters, PlannedJob
from common.state.jobs import Phase
from services.planner.policies.allocation import StageTimes
from services.planner.policies.stages import times


@dataclass(frozen=True, slots=True)
class StageWatch:
    """What is remembered of the stage times of a job."""

    first: Counters | None = None  # when the window that is looked at began
    observed_ms: int = 0  # when it looked at the counters last
    moved_step: int | None = None  # of the last move
    last: StageTimes | None = None  # that were told

    def document(self) -> dict[str, Any]:
        """It as JSON has it."""
        found = asdict(self)
        if self.first is not None:
            found["first"]["sources"] = sorted(self.first.sources)
        return found

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> StageWatch:
        """The watch of a `document`."""
        first, last = document["first"], document["last"]
        if first is not None:
            first = Counters(**(first | {"sources": frozenset(first["sources"])}))
        last = StageTimes(**last) if last is not None else None
        return cls(first, document["observed_ms"], document["moved_step"], last)

    def moved(self, step: int) -> StageWatch:
        """The watch after a move at this step: times from before say nothing of those after."""
        return replace(self, first=None, moved_step=max(self.moved_step or 0, step))


def look(
    watch: StageWatch, job: PlannedJob, settled: bool, now_ms: int
) -> tuple[StageWatch, StageTimes | None]:
    """The watch after this look, and the stage times when a move may be decided by them."""
    config = job.config
    if job.phase != Phase.TRAINING or job.steps_done <= config.warmup_steps:
        return watch, None
    if not settled:
        return replace(watch, first=None), None
    if now_ms - watch.observed_ms < 1000 * config.interval_s:
        return watch, None
    first = watch.first
    if first is None or first.sources != job.counters.sources:
        first = job.counters
    told = times(first, job.counters, job.groups_per_step)
    watch = replace(watch, first=first, observed_ms=now_ms, last=told or watch.last)
    moved = watch.moved_step
    cooling = moved is not None and job.steps_done < moved + config.cooldown_steps
    return watch, None if cooling else told
