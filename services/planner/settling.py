"""The conditions under which stage times may move a gang: the mesh must have settled.

The job trains and its warm-up is over; every gang does what was decided last; the last look at the
stage times is an interval ago, and the last move `cooldown_steps`; and since the processes last
changed there were enough steps and groups to tell the times from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.state.gangs import Gang
from common.state.jobs import Phase
from services.planner.allocation import StageTimes
from services.planner.job import PlannedJob
from services.planner.presence import usable
from services.planner.stages import Published, StageWindow, read


@dataclass(frozen=True, slots=True)
class StageWatch:
    """What a leader remembers of the stage times of a job."""

    job: str = ""
    window: StageWindow = field(default_factory=lambda: StageWindow(1))
    observed_s: float = -math.inf  # when it looked at the counters last
    last_move_step: float = -math.inf

    def moved(self, step: int) -> StageWatch:
        """The watch after a move at this step: times from before say nothing of those after."""
        return replace(self, window=self.window.emptied(), last_move_step=step)

    def arrived(self, details: Mapping[str, Any]) -> StageWatch:
        """The watch after a move of these details is complete; a predecessor may have made it."""
        step = details.get("step", -math.inf)  # a gang that was away may arrive late
        return replace(self, last_move_step=max(self.last_move_step, step))


def following(watch: StageWatch, job: PlannedJob | None) -> StageWatch:
    """The watch of this job; it begins anew when the mesh takes up another job."""
    if job is None:
        return replace(StageWatch(), observed_s=watch.observed_s)
    if job.id == watch.job:
        return watch
    return StageWatch(job.id, StageWindow(job.groups_per_step), watch.observed_s)


def look(
    watch: StageWatch,
    job: PlannedJob,
    gangs: Sequence[Gang],
    entries: Iterable[Published],
    now_s: float,
) -> tuple[StageWatch, StageTimes | None]:
    """The watch after this look, and the stage times when a move may be decided by them.

    `entries` are those of live processes.
    """
    if job.phase != Phase.TRAINING or job.steps_done <= job.config.warmup_steps:
        return watch, None
    if not all(g.settled for g in usable(gangs)):
        return replace(watch, window=watch.window.emptied()), None
    if now_s - watch.observed_s < job.config.interval_s:
        return watch, None
    window = watch.window.observed(read(job.id, entries))
    watch = replace(watch, window=window, observed_s=now_s)
    cooling = job.steps_done < watch.last_move_step + job.config.cooldown_steps
    return watch, None if cooling else window.times()
