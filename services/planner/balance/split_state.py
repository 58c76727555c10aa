"""State of a job's split between passes: its account, its window and its trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.services.planner.balance.trials import MAX_VERDICTS, Trial, Verdict, update_bias
from meshrl.services.planner.forecast.engine_curves import Curves
from meshrl.services.planner.forecast.step_quantities import WorkerSplit
from meshrl.services.planner.forecast.work_account import (
    StepEnds,
    StepTotals,
    WorkAccount,
    WorkWindow,
    build_window,
)


@dataclass(frozen=True, slots=True)
class DesiredShape:
    """Desired engines and hybrids of a job, reached over several passes."""

    rule: str
    degrees: tuple[int, ...]
    hybrids: int
    deadline_ms: int  # deadline
    figures: Mapping[str, Any] = field(default_factory=dict)  # figures of the decision


@dataclass(frozen=True, slots=True)
class SplitState:
    """Split state of one job. A direction is the role that a move gives workers. Steps are those
    counted by the account.
    """

    account: WorkAccount = field(default_factory=WorkAccount)
    split: WorkerSplit | None = None  # split of the window
    split_since_step: int = 0  # first step of the split
    window_start: StepTotals | None = None  # begin of the window
    next_window_start: StepTotals | None = None  # begin of the next window
    step_ends: StepEnds = field(default_factory=StepEnds)
    observed_ms: int = 0  # time of the last counters
    simulated_ms: int = 0  # time of the last simulation
    last_plan_step: int = 0
    rejected_at_plan: int = 0  # rejected trajectories at the last plan
    last_move_step: int | None = None
    trial: Trial | None = None
    verdicts: tuple[Verdict, ...] = ()  # last ones
    # by direction: moves that did not pay
    failed_moves: Mapping[str, int] = field(default_factory=dict)
    # by direction: imbalance at the failed move
    failed_imbalance: Mapping[str, float] = field(default_factory=dict)
    bias: Mapping[str, float] = field(default_factory=dict)  # by direction: correction
    switch_s: float = 0.0  # mean seconds of a move; 0: none was made
    explanation: Mapping[str, Any] = field(default_factory=dict)  # figures for display
    desired_shape: DesiredShape | None = None  # not reached yet
    is_colocated: bool = False  # the planner's choice for pool.colocate = "auto"
    curves: Curves = field(default_factory=dict)  # of degrees that its engines have had

    # -- window ------------------------------------------------------------------------------------

    def record_totals(
        self, totals: StepTotals, split: WorkerSplit, lag_steps: int, window_steps: int
    ) -> SplitState:
        """Record totals, and return the new split state.

        A window has one split, and between `window_steps` and twice as many steps. It begins
        `lag_steps` after a split changes, when groups of the old split are trained.
        """
        if self.split is None:  # no samples of another split
            return replace(self, split=split, split_since_step=totals.step - lag_steps)
        watch, older = (
            replace(self, step_ends=self.step_ends.record(totals)),
            self.next_window_start or self.window_start,
        )
        if not split.is_same(self.split) or (
            self.window_start is not None and totals.step < self.window_start.step
        ):
            return replace(
                watch,
                split=split,
                split_since_step=totals.step,
                window_start=None,
                next_window_start=None,
            )
        if totals.step <= self.split_since_step + lag_steps:
            return watch
        if older is None:
            return replace(watch, window_start=totals)
        window = build_window(older, totals)
        long = window is not None and window.is_long_enough(window_steps)
        return replace(watch, window_start=older, next_window_start=totals) if long else watch

    def compute_window(self, totals: StepTotals, min_steps: int) -> WorkWindow | None:
        """Return the window up to these totals if it has at least `min_steps`."""
        found = build_window(self.window_start, totals) if self.window_start is not None else None
        return found if found is not None and found.is_long_enough(min_steps) else None

    def reset_window(self) -> SplitState:
        """Return the split state of a stopped job, without a window."""
        trial = replace(self.trial, window_start=None) if self.trial is not None else None
        return replace(self, window_start=None, next_window_start=None, trial=trial)

    # -- moves -------------------------------------------------------------------------------------

    def record_move(self, step: int, trial: Trial | None) -> SplitState:
        """Return the split state after a move at this step."""
        return replace(self, last_move_step=step, last_plan_step=step, trial=trial)

    def record_verdict(self, verdict: Verdict, imbalance: float, step: int) -> SplitState:
        """Return the split state after a verdict. A direction that did not pay requires more gain
        next time.
        """
        trial, towards = self.trial, verdict.direction
        assert trial is not None
        failures = dict(self.failed_moves)
        failures[towards] = 0 if verdict.paid else failures.get(towards, 0) + 1
        bias = dict(self.bias) | {towards: update_bias(trial.bias, verdict)}
        return replace(
            self,
            trial=None,
            last_move_step=step,
            verdicts=(*self.verdicts, verdict)[-MAX_VERDICTS:],
            failed_moves=failures,
            failed_imbalance=dict(self.failed_imbalance)
            | ({} if verdict.paid else {towards: imbalance}),
            bias=bias,
        )
