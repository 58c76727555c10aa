"""Account of a job's work: totals that survive restarts of processes, and windows of them.

Processes count from their own start. The work since the last snapshot is added to the totals, so a
window spans restarts of shards and cores. Work of engines is counted by the shards that send them
requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from meshrl.common.state.pool.demand.measurements import MeasuredWork, Measurements

# Minimum length of a window: processes report counters with each lease renewal,
# every 1.5 s, and not at the same time.
MIN_WINDOW_S = 6.0
PRIOR_DEVIATION, PRIOR_STEPS = (
    0.3,
    2,
)  # prior relative deviation of a step's time, and its weight in steps
MAX_STEP_ENDS = 40  # maximum number of retained step ends: the longest trial
MAX_PROCESSES = 16  # processes of a job that are remembered, as a process may return


@dataclass(frozen=True, slots=True)
class WorkAccount:
    """Work account of one job."""

    # by process: its last counters
    last_by_process: Mapping[str, MeasuredWork] = field(default_factory=dict)
    total: MeasuredWork = field(default_factory=MeasuredWork)

    def credit(self, measured: Measurements) -> WorkAccount:
        """Return the account with the work since the last snapshot added."""
        total, last = self.total, dict(self.last_by_process)
        for source, work in measured.work_by_process.items():
            before = last.pop(source, MeasuredWork())
            if work != before:
                total = total + (work - before)
            last[source] = work
        for source in list(last)[: max(0, len(last) - MAX_PROCESSES)]:
            if source not in measured.work_by_process:
                del last[source]
        return WorkAccount(last, total)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Totals of a job at a number of steps."""

    step: int
    at_ms: int
    work: MeasuredWork


@dataclass(frozen=True, slots=True)
class WorkWindow:
    """Work between two totals."""

    steps: int
    seconds: float
    work: MeasuredWork

    def is_long_enough(self, min_steps: int) -> bool:
        """Return True if the window has `min_steps`, and lasts long enough for consistent
        counters.
        """
        return self.steps >= min_steps and self.seconds >= MIN_WINDOW_S

    @property
    def step_s(self) -> float:
        """Seconds of a step, without waits for an evaluation."""
        return compute_stepping_s(self.work) / self.steps


def compute_stepping_s(work: MeasuredWork) -> float:
    """Compute the seconds of stepping, without waits for an evaluation."""
    return work.busy_s + work.wait_s - work.held_s


@dataclass(frozen=True, slots=True)
class StepEnds:
    """End times of steps on the clock of `compute_stepping_s`, to estimate how much steps
    differ.
    """

    ends: tuple[tuple[int, float], ...] = ()  # (step, seconds) of the last snapshots with new steps

    @property
    def last_step(self) -> int:
        """Last completed step; -1: not known."""
        return self.ends[-1][0] if self.ends else -1

    def record(self, totals: StepTotals) -> StepEnds:
        """Return the end times with those of another snapshot added."""
        if self.ends and self.ends[-1][0] == totals.step:
            return self
        ends = self.ends if not self.ends or self.ends[-1][0] < totals.step else ()
        return StepEnds(
            (*ends, (totals.step, round(compute_stepping_s(totals.work), 4)))[-MAX_STEP_ENDS:]
        )

    def estimate_deviation(self, first_step: int, last_step: int) -> float:
        """Estimate the relative deviation of the time of one step in this range. A prior deviation
        supplements few samples.
        """
        ends = [one for one in self.ends if first_step <= one[0] <= last_step]
        # For each snapshot with new steps: their number and mean time.
        parts = [(b[0] - a[0], (b[1] - a[1]) / (b[0] - a[0])) for a, b in pairwise(ends)]
        degrees_of_freedom, squares = len(parts) - 1, 0.0
        if degrees_of_freedom > 0:
            weight = sum(steps for steps, _ in parts)
            each = weight / len(parts)  # means of several steps differ less
            mean_s = sum(steps * s for steps, s in parts) / weight
            variance = sum(steps * (s - mean_s) ** 2 for steps, s in parts) / weight
            squares = variance * each * len(parts) / max(mean_s, 1e-9) ** 2
        return math.sqrt(
            (squares + PRIOR_STEPS * PRIOR_DEVIATION**2)
            / (max(0, degrees_of_freedom) + PRIOR_STEPS)
        )

    def estimate_mean_error(self, first_step: int, last_step: int) -> float:
        """Estimate the relative standard error of the mean time of a step in this range."""
        return self.estimate_deviation(first_step, last_step) / math.sqrt(
            max(1, last_step - first_step)
        )


def build_window(first: StepTotals, last: StepTotals) -> WorkWindow | None:
    """Build the window between two totals. Return None without a completed step, or across
    lineages.
    """
    steps, seconds = last.step - first.step, (last.at_ms - first.at_ms) / 1000
    if steps <= 0 or seconds <= 0:
        return None
    return WorkWindow(steps, seconds, last.work - first.work)
