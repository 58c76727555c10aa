"""The trial of each move: what it was to bring, what it brought, and whether it is undone.

A move changes a running job whose demand changes, too: trajectories grow, tools slow down. So a
step after it is not compared with a step before it, but with what a step would take now without it:
the model of the old split, with the rates that were measured with it, for the demand of now. The
window that is judged begins when all that was sampled with the old split has been trained.
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

MIN_STANDARD_ERRORS = 1.5  # standard errors by which two times differ that are told apart
MAX_WINDOW_FACTOR = 4  # times the window that a verdict may take
MAX_VERDICTS = 12  # verdicts that a job remembers
BIAS_BOUNDS = (0.7, 1.5)  # bounds of the correction that verdicts give a rule's predictions
DEGREES_DIRECTION = "degrees"  # what a move is towards that gives engines other degrees
VERDICT_WEIGHT = 0.5  # weight of the last verdict in that correction


@dataclass(frozen=True, slots=True)
class Trial:
    """A move that is not judged yet."""

    rule: str
    resident: str  # the first that arrived
    before: WorkerSplit
    after: WorkerSplit
    step: int  # of the job, at which it was decided
    before_s: float  # seconds of a step, measured
    predicted_s: float  # of a step after it, all corrections in it
    bias: float  # the correction of the rule that is in it
    demand: StepDemand
    rates: StepRates
    moved: int  # workers
    error: float  # standard error of `before_s`, as a share of it
    begins: StepTotals | None = None  # of the window that is judged
    settled_step: int | None = None  # at which all was where it was wished

    @property
    def direction(self) -> str:
        """The role that it gave workers; `RESHAPED` where engines got other degrees."""
        if self.after.degrees != self.before.degrees:
            return DEGREES_DIRECTION
        return "training" if self.after.trainers > self.before.trainers else "rollout"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a move was to bring, and what it brought. Seconds of a step."""

    rule: str
    resident: str
    towards: str
    moved: int
    step: int  # of the job, at which it was decided
    judged_after: int  # steps, from the end of the move
    before_s: float
    expected_s: float  # without the move, by now
    predicted_s: float  # with it, by now
    observed_s: float
    paid: bool
    was: str = ""  # the engines of the job, where they got other degrees,
    became: str = ""  # and those that it has then

    @property
    def regret_s(self) -> float:
        """What each step takes longer than without the move; negative: what it saves."""
        return self.observed_s - self.expected_s

    @property
    def relative_error(self) -> float:
        """Of the prediction, as a share of what was observed."""
        return abs(self.predicted_s / self.observed_s - 1)

    def to_event(self) -> dict[str, Any]:
        """It for an event."""
        found = {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}
        for name in ("rule", "towards", "was", "became"):
            del found[name]
        sides = ("rollout", "training")
        there, here = sides if self.towards == "training" else sides[::-1]
        if self.towards == DEGREES_DIRECTION:
            there, here = self.was, self.became
        return found | {
            "policy": self.rule,
            "from": there,
            "to": here,
            "regret_s": round(self.regret_s, 4),
            "undone": not self.paid,
        }


def update_trial_window(
    trial: Trial, is_reconciled: bool, totals: StepTotals, terms: StepTerms
) -> Trial:
    """The trial after another look: its window begins when what was sampled before is trained."""
    if trial.settled_step is None:
        return replace(trial, settled_step=totals.step) if is_reconciled else trial
    if trial.begins is None and totals.step > trial.settled_step + terms.max_staleness:
        return replace(trial, begins=totals)
    return trial


@dataclass(frozen=True, slots=True)
class TrialEvidence:
    """What is measured with the split of after."""

    window: WorkWindow
    demand: StepDemand
    error: float  # of the window's mean time of a step, as a share of it
    rates: StepRates | None = None  # given where nothing was measured before the move


def judge_trial(
    trial: Trial, evidence: TrialEvidence, terms: StepTerms, min_steps: int
) -> Verdict | None:
    """The verdict on what is shown in `steps` at least; as long as the two times are not told apart
    from how much steps differ anyway, more are waited for.
    """
    verdict = _compute_verdict(trial, evidence, terms)
    error_s = math.hypot(trial.error * trial.before_s, evidence.error * verdict.observed_s)
    close = abs(verdict.regret_s) < MIN_STANDARD_ERRORS * error_s
    return None if close and evidence.window.steps < MAX_WINDOW_FACTOR * min_steps else verdict


def _compute_verdict(trial: Trial, evidence: TrialEvidence, terms: StepTerms) -> Verdict:
    assert trial.begins is not None and trial.settled_step is not None
    before_s, now, window = trial.before_s, evidence.demand, evidence.window
    observed_s = window.step_s
    model_s = predict_step_s(trial.demand, trial.rates, trial.before, terms, before_s)
    rates = scale_rates(trial.rates, now, trial.demand)
    goes_s = predict_step_s(now, rates, trial.after, terms, before_s)
    if evidence.rates is None:
        stays_s = predict_step_s(now, rates, trial.before, terms, before_s)
        expected_s = correct_prediction(stays_s, model_s, before_s, trial.error)
    else:
        here_s = predict_step_s(now, evidence.rates, trial.after, terms, observed_s)
        stays_s = predict_step_s(now, evidence.rates, trial.before, terms, observed_s)
        expected_s = correct_prediction(stays_s, here_s, observed_s, evidence.error)
    return Verdict(
        rule=trial.rule,
        resident=trial.resident,
        towards=trial.direction,
        moved=trial.moved,
        step=trial.step,
        judged_after=trial.begins.step + window.steps - trial.settled_step,
        before_s=trial.before_s,
        expected_s=expected_s,
        predicted_s=correct_prediction(goes_s, model_s, before_s, trial.error) * trial.bias,
        observed_s=observed_s,
        paid=observed_s < expected_s,
        was=trial.before.description if trial.direction == DEGREES_DIRECTION else "",
        became=trial.after.description if trial.direction == DEGREES_DIRECTION else "",
    )


def update_bias(bias: float, verdict: Verdict) -> float:
    """The correction of a rule's predictions after a verdict on one that had `bias` in it."""
    raw = bias * verdict.observed_s / verdict.predicted_s
    least, most = BIAS_BOUNDS
    return min(
        most,
        max(
            least, math.exp((1 - VERDICT_WEIGHT) * math.log(bias) + VERDICT_WEIGHT * math.log(raw))
        ),
    )
