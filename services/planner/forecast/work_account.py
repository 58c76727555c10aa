"""The account of a job's work: totals that go on when a process comes or goes, and windows of them.

Processes count from their own start. What each has done since it was last seen is added to the
totals, so that a window spans restarts of shards and cores, and knows nothing of engines: what
those do is counted by the shards that ask them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from meshrl.common.state.pool.demand.measurements import MeasuredWork, Measurements

# A window lasts so long at least: processes tell their counts with each renewal of their leases,
# every 1.5 s, and not at the same moment.
MIN_WINDOW_S = 6.0
PRIOR_DEVIATION, PRIOR_STEPS = (
    0.3,
    2,
)  # deviation of a step's time as a share of it, and the steps it is worth
MAX_STEP_ENDS = 40  # looks whose times are kept: the longest trial
MAX_PROCESSES = (
    16  # processes of a job that are remembered: one that was away for a moment comes back
)


@dataclass(frozen=True, slots=True)
class WorkAccount:
    """Of one job."""

    last: Mapping[str, MeasuredWork] = field(
        default_factory=dict
    )  # by process, as it was seen last
    total: MeasuredWork = field(default_factory=MeasuredWork)

    def credit(self, measured: Measurements) -> WorkAccount:
        """The account after another look."""
        total, last = self.total, dict(self.last)
        for source, work in measured.work.items():
            before = last.pop(source, MeasuredWork())
            if work != before:
                total = total + (work - before)
            last[source] = work
        for source in list(last)[: max(0, len(last) - MAX_PROCESSES)]:
            if source not in measured.work:
                del last[source]
        return WorkAccount(last, total)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The totals of a job when it had made so many steps."""

    step: int
    ms: int
    total: MeasuredWork


@dataclass(frozen=True, slots=True)
class WorkWindow:
    """What was done between two marks."""

    steps: int
    seconds: float
    work: MeasuredWork

    def is_long_enough(self, min_steps: int) -> bool:
        """Whether it has so many steps, and lasts long enough for its counts to belong together."""
        return self.steps >= min_steps and self.seconds >= MIN_WINDOW_S

    @property
    def step_s(self) -> float:
        """Seconds of a step, less what it waited for an evaluation."""
        return compute_stepping_s(self.work) / self.steps


def compute_stepping_s(work: MeasuredWork) -> float:
    """Seconds in which steps went on, less what they waited for an evaluation."""
    return work.busy_s + work.wait_s - work.held_s


@dataclass(frozen=True, slots=True)
class StepEnds:
    """When steps ended, on the clock of `stepping_s`: what tells how much they differ."""

    ends: tuple[tuple[int, float], ...] = ()  # (step, seconds), of the last looks at new ones

    @property
    def last_step(self) -> int:
        """The step that ended last; -1: none is known."""
        return self.ends[-1][0] if self.ends else -1

    def record(self, totals: StepTotals) -> StepEnds:
        """The times after another look."""
        if self.ends and self.ends[-1][0] == totals.step:
            return self
        ends = self.ends if not self.ends or self.ends[-1][0] < totals.step else ()
        return StepEnds(
            (*ends, (totals.step, round(compute_stepping_s(totals.total), 4)))[-MAX_STEP_ENDS:]
        )

    def estimate_deviation(self, first_step: int, last_step: int) -> float:
        """The deviation of the time of one step among these, as a share of it. As few tell little,
        what steps usually vary by is worth some of them.
        """
        ends = [one for one in self.ends if first_step <= one[0] <= last_step]
        # Of each look at new ones: how many, and their mean time.
        parts = [(b[0] - a[0], (b[1] - a[1]) / (b[0] - a[0])) for a, b in pairwise(ends)]
        told, squares = len(parts) - 1, 0.0
        if told > 0:
            weight = sum(steps for steps, _ in parts)
            each = weight / len(parts)  # means of several differ less
            mean_s = sum(steps * s for steps, s in parts) / weight
            variance = sum(steps * (s - mean_s) ** 2 for steps, s in parts) / weight
            squares = variance * each * len(parts) / max(mean_s, 1e-9) ** 2
        return math.sqrt(
            (squares + PRIOR_STEPS * PRIOR_DEVIATION**2) / (max(0, told) + PRIOR_STEPS)
        )

    def estimate_mean_error(self, first_step: int, last_step: int) -> float:
        """The standard error of the mean time of a step among these, as a share of it."""
        return self.estimate_deviation(first_step, last_step) / math.sqrt(
            max(1, last_step - first_step)
        )


def build_window(first: StepTotals, last: StepTotals) -> WorkWindow | None:
    """The window between two marks; None where no step was made, or a lineage was left."""
    steps, seconds = last.step - first.step, (last.ms - first.ms) / 1000
    if steps <= 0 or seconds <= 0:
        return None
    return WorkWindow(steps, seconds, last.total - first.total)
