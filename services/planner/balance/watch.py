"""What is remembered of a job's split from look to look: its account, its window, its trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.services.planner.balance.trials import KEPT, Trial, Verdict, learned
from meshrl.services.planner.forecast.accounts import Account, StepMark, Times, Window, between
from meshrl.services.planner.forecast.degrees import Curves
from meshrl.services.planner.forecast.quantities import Split


@dataclass(frozen=True, slots=True)
class ShapeWish:
    """The engines and helpers that a job is to have: looks that follow bring it there."""

    rule: str
    degrees: tuple[int, ...]
    helpers: int
    until_ms: int  # then it is given up
    figures: Mapping[str, Any] = field(default_factory=dict)  # that it was decided by


@dataclass(frozen=True, slots=True)
class SplitWatch:
    """Of one job. Directions are the role that a move gives workers; steps are those that its
    account has counted.
    """

    account: Account = field(default_factory=Account)
    split: Split | None = None  # that the window was measured with
    split_step: int = 0  # since when
    older: StepMark | None = None  # the window begins here,
    newer: StepMark | None = None  # and the next one here
    times: Times = field(default_factory=Times)
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
    wish: ShapeWish | None = None  # that is not fulfilled yet
    curves: Curves = field(default_factory=dict)  # of degrees that engines of it have had

    # -- its window --------------------------------------------------------------------------------

    def marked(self, mark: StepMark, split: Split, lag: int, steps: int) -> SplitWatch:
        """The watch at this mark. A window is of one split and `steps` long, twice that at most; it
        begins when what was sampled with another split, `lag` steps of groups, has been trained.
        """
        if self.split is None:  # nothing was sampled with another one
            return replace(self, split=split, split_step=mark.step - lag)
        watch, older = replace(self, times=self.times.at(mark)), self.newer or self.older
        if not split.same(self.split) or (self.older is not None and mark.step < self.older.step):
            return replace(watch, split=split, split_step=mark.step, older=None, newer=None)
        if mark.step <= self.split_step + lag:
            return watch
        if older is None:
            return replace(watch, older=mark)
        window = between(older, mark)
        long = window is not None and window.long(steps)
        return replace(watch, older=older, newer=mark) if long else watch

    def window(self, mark: StepMark, steps: int) -> Window | None:
        """The window until this mark, when it is long enough."""
        found = between(self.older, mark) if self.older is not None else None
        return found if found is not None and found.long(steps) else None

    def interrupted(self) -> SplitWatch:
        """The watch of a job that stands: times do not go on from before."""
        trial = replace(self.trial, begins=None) if self.trial is not None else None
        return replace(self, older=None, newer=None, trial=trial)

    # -- its moves ---------------------------------------------------------------------------------

    def moved(self, step: int, trial: Trial | None) -> SplitWatch:
        """The watch after a move at this step."""
        return replace(self, moved_step=step, planned_step=step, trial=trial)

    def convinced(self, verdict: Verdict, imbalance: float, step: int) -> SplitWatch:
        """The watch after a verdict: a direction that did not pay needs more next time."""
        trial, towards = self.trial, verdict.towards
        assert trial is not None
        failures = dict(self.failures)
        failures[towards] = 0 if verdict.paid else failures.get(towards, 0) + 1
        bias = dict(self.bias) | {towards: learned(trial.bias, verdict)}
        return replace(
            self,
            trial=None,
            moved_step=step,
            verdicts=(*self.verdicts, verdict)[-KEPT:],
            failures=failures,
            failed_at=dict(self.failed_at) | ({} if verdict.paid else {towards: imbalance}),
            bias=bias,
        )
