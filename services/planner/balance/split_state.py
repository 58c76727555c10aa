"""What is remembered of a job's split from look to look: its account, its window, its trial."""

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
    """The engines and helpers that a job is to have: looks that follow bring it there."""

    rule: str
    degrees: tuple[int, ...]
    helpers: int
    until_ms: int  # then it is given up
    figures: Mapping[str, Any] = field(default_factory=dict)  # that it was decided by


@dataclass(frozen=True, slots=True)
class SplitState:
    """Of one job. Directions are the role that a move gives workers; steps are those that its
    account has counted.
    """

    account: WorkAccount = field(default_factory=WorkAccount)
    split: WorkerSplit | None = None  # that the window was measured with
    split_step: int = 0  # since when
    older: StepTotals | None = None  # the window begins here,
    newer: StepTotals | None = None  # and the next one here
    times: StepEnds = field(default_factory=StepEnds)
    observed_ms: int = 0  # when the counters were looked at last
    played_ms: int = 0  # when steps were played ahead last, which takes a while
    planned_step: int = 0
    rejected: int = 0  # of the job, when it was planned last
    moved_step: int | None = None
    trial: Trial | None = None
    verdicts: tuple[Verdict, ...] = ()  # the last ones
    failures: Mapping[str, int] = field(default_factory=dict)  # by direction: that did not pay
    failed_at: Mapping[str, float] = field(default_factory=dict)  # rollout over training then
    bias: Mapping[str, float] = field(default_factory=dict)  # by direction: correction
    switch_s: float = 0.0  # that a move takes until it is settled; 0: none was made
    explained: Mapping[str, Any] = field(default_factory=dict)  # for people
    wish: DesiredShape | None = None  # that is not fulfilled yet
    curves: Curves = field(default_factory=dict)  # of degrees that engines of it have had

    # -- its window --------------------------------------------------------------------------------

    def record_totals(
        self, totals: StepTotals, split: WorkerSplit, lag_steps: int, window_steps: int
    ) -> SplitState:
        """The watch at this mark. A window is of one split and `steps` long, twice that at most; it
        begins when what was sampled with another split, `lag` steps of groups, has been trained.
        """
        if self.split is None:  # nothing was sampled with another one
            return replace(self, split=split, split_step=totals.step - lag_steps)
        watch, older = replace(self, times=self.times.record(totals)), self.newer or self.older
        if not split.is_same(self.split) or (
            self.older is not None and totals.step < self.older.step
        ):
            return replace(watch, split=split, split_step=totals.step, older=None, newer=None)
        if totals.step <= self.split_step + lag_steps:
            return watch
        if older is None:
            return replace(watch, older=totals)
        window = build_window(older, totals)
        long = window is not None and window.is_long_enough(window_steps)
        return replace(watch, older=older, newer=totals) if long else watch

    def compute_window(self, totals: StepTotals, min_steps: int) -> WorkWindow | None:
        """The window until this mark, when it is long enough."""
        found = build_window(self.older, totals) if self.older is not None else None
        return found if found is not None and found.is_long_enough(min_steps) else None

    def reset_window(self) -> SplitState:
        """The watch of a job that stands: times do not go on from before."""
        trial = replace(self.trial, begins=None) if self.trial is not None else None
        return replace(self, older=None, newer=None, trial=trial)

    # -- its moves ---------------------------------------------------------------------------------

    def record_move(self, step: int, trial: Trial | None) -> SplitState:
        """The watch after a move at this step."""
        return replace(self, moved_step=step, planned_step=step, trial=trial)

    def record_verdict(self, verdict: Verdict, imbalance: float, step: int) -> SplitState:
        """The watch after a verdict: a direction that did not pay needs more next time."""
        trial, towards = self.trial, verdict.towards
        assert trial is not None
        failures = dict(self.failures)
        failures[towards] = 0 if verdict.paid else failures.get(towards, 0) + 1
        bias = dict(self.bias) | {towards: update_bias(trial.bias, verdict)}
        return replace(
            self,
            trial=None,
            moved_step=step,
            verdicts=(*self.verdicts, verdict)[-MAX_VERDICTS:],
            failures=failures,
            failed_at=dict(self.failed_at) | ({} if verdict.paid else {towards: imbalance}),
            bias=bias,
        )
