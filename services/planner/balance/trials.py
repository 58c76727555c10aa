"""Trial of each move: its predicted effect, its measured effect, and whether it is undone.

The demand of a running job changes during a move: trajectories grow, tools slow down. So a step
after the move is compared with a prediction for the old split, not with a step before it. That
prediction uses the rates measured with the old split and the current demand. The judged window
begins when all samples of the old split have been trained.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshrl.services.planner.forecast.prediction import (
    correct_prediction,
    predict_step_s,
    scale_rates,
)
from meshrl.services.planner.forecast.step_quantities import (
    StepDemand,
    StepRates,
    StepTerms,
    WorkerSplit,
)
from meshrl.services.planner.forecast.work_account import StepTotals, WorkWindow

MIN_STANDARD_ERRORS = 1.5  # difference of two times, in standard errors, that is significant
MAX_WINDOW_FACTOR = 4  # maximum length of a verdict, in windows
MAX_VERDICTS = 12  # verdicts retained per job
BIAS_BOUNDS = (0.7, 1.5)  # bounds of the correction of a rule's predictions
DEGREES_DIRECTION = "degrees"  # direction of a move that changes degrees
# Directions of a change of the mode: engines on the core's workers, or only on their own.
COLOCATED, SPLIT = "colocated", "split"
VERDICT_WEIGHT = 0.5  # weight of the last verdict in the correction


@dataclass(frozen=True, slots=True)
class Trial:
    """Move that is not judged yet."""

    rule: str
    instance: str  # first new instance
    split_before: WorkerSplit
    split_after: WorkerSplit
    step: int  # of the job, at the decision
    step_before_s: float  # seconds of a step, measured
    predicted_step_s: float  # seconds of a step, corrected prediction
    bias: float  # correction contained in the prediction
    demand: StepDemand
    rates: StepRates
    moved_workers: int  # workers
    relative_error: float  # standard error of `before_s`, as a share of it
    window_start: StepTotals | None = None  # begin of the judged window
    settled_step: int | None = None  # step at which the desired state was reached

    @property
    def direction(self) -> str:
        """Role that the move gave workers; `DEGREES_DIRECTION` if engines changed degrees;
        `COLOCATED` or `SPLIT` if the mode changed.
        """
        if shared := self.split_after.shared_engines - self.split_before.shared_engines:
            return COLOCATED if shared > 0 else SPLIT
        if self.split_after.degrees != self.split_before.degrees:
            return DEGREES_DIRECTION
        return "training" if self.split_after.trainers > self.split_before.trainers else "rollout"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Predicted and measured effect of a move, in seconds of a step."""

    rule: str
    instance: str
    direction: str
    moved: int
    step: int  # of the job, at the decision
    judged_after: int  # steps from the end of the move
    before_s: float
    expected_s: float  # now, without the move
    predicted_s: float  # now, with the move
    observed_s: float
    paid: bool
    engines_before: str = ""  # engines before, if degrees changed
    engines_after: str = ""  # engines after

    @property
    def regret_s(self) -> float:
        """Additional seconds of each step caused by the move; negative: saved seconds."""
        return self.observed_s - self.expected_s

    @property
    def relative_error(self) -> float:
        """Relative error of the prediction, as a share of the observed time."""
        return abs(self.predicted_s / self.observed_s - 1)

    def to_event(self) -> dict[str, Any]:
        """Return the verdict as the fields of an event."""
        found = {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}
        for name in ("rule", "instance", "direction", "engines_before", "engines_after"):
            del found[name]
        sides = ("rollout", "training")
        there, here = sides if self.direction == "training" else sides[::-1]
        if self.direction in (COLOCATED, SPLIT):
            here = self.direction
            there = COLOCATED if here == SPLIT else SPLIT
        if self.direction == DEGREES_DIRECTION:
            there, here = self.engines_before, self.engines_after
        return found | {
            "resident": self.instance,
            "policy": self.rule,
            "from": there,
            "to": here,
            "regret_s": round(self.regret_s, 4),
            "undone": not self.paid,
        }


def update_trial_window(
    trial: Trial, is_reconciled: bool, totals: StepTotals, terms: StepTerms
) -> Trial:
    """Return the trial with its window begun once all samples of the old split are trained."""
    if trial.settled_step is None:
        return replace(trial, settled_step=totals.step) if is_reconciled else trial
    if trial.window_start is None and totals.step > trial.settled_step + terms.max_staleness:
        return replace(trial, window_start=totals)
    return trial


@dataclass(frozen=True, slots=True)
class TrialEvidence:
    """Measurements with the new split."""

    window: WorkWindow
    demand: StepDemand
    error: float  # standard error of the mean step time, as a share of it
    rates: StepRates | None = None  # given if none were measured before the move


def judge_trial(
    trial: Trial, evidence: TrialEvidence, terms: StepTerms, min_steps: int
) -> Verdict | None:
    """Judge a trial after `min_steps` steps. Return None, up to `MAX_WINDOW_FACTOR` windows, while
    noise exceeds the difference of the two times.
    """
    verdict = _compute_verdict(trial, evidence, terms)
    error_s = math.hypot(
        trial.relative_error * trial.step_before_s, evidence.error * verdict.observed_s
    )
    close = abs(verdict.regret_s) < MIN_STANDARD_ERRORS * error_s
    return None if close and evidence.window.steps < MAX_WINDOW_FACTOR * min_steps else verdict


def _compute_verdict(trial: Trial, evidence: TrialEvidence, terms: StepTerms) -> Verdict:
    assert trial.window_start is not None and trial.settled_step is not None
    before_s, now, window = trial.step_before_s, evidence.demand, evidence.window
    observed_s = window.step_s
    model_s = predict_step_s(trial.demand, trial.rates, trial.split_before, terms, before_s)
    rates = scale_rates(trial.rates, now, trial.demand)
    goes_s = predict_step_s(now, rates, trial.split_after, terms, before_s)
    if evidence.rates is None:
        stays_s = predict_step_s(now, rates, trial.split_before, terms, before_s)
        expected_s = correct_prediction(stays_s, model_s, before_s, trial.relative_error)
    else:
        here_s = predict_step_s(now, evidence.rates, trial.split_after, terms, observed_s)
        stays_s = predict_step_s(now, evidence.rates, trial.split_before, terms, observed_s)
        expected_s = correct_prediction(stays_s, here_s, observed_s, evidence.error)
    return Verdict(
        rule=trial.rule,
        instance=trial.instance,
        direction=trial.direction,
        moved=trial.moved_workers,
        step=trial.step,
        judged_after=trial.window_start.step + window.steps - trial.settled_step,
        before_s=trial.step_before_s,
        expected_s=expected_s,
        predicted_s=correct_prediction(goes_s, model_s, before_s, trial.relative_error)
        * trial.bias,
        observed_s=observed_s,
        paid=observed_s < expected_s,
        engines_before=trial.split_before.description
        if trial.direction == DEGREES_DIRECTION
        else "",
        engines_after=trial.split_after.description if trial.direction == DEGREES_DIRECTION else "",
    )


def update_bias(bias: float, verdict: Verdict) -> float:
    """Return the corrected bias of a rule's predictions after a verdict."""
    raw = bias * verdict.observed_s / verdict.predicted_s
    least, most = BIAS_BOUNDS
    return min(
        most,
        max(
            least, math.exp((1 - VERDICT_WEIGHT) * math.log(bias) + VERDICT_WEIGHT * math.log(raw))
        ),
    )
