"""Prediction of the seconds of a job's step for any split of its workers, from measurements.

Steps are simulated (`step_simulation.py`): groups admitted by the staleness gate cycle between
engines, tools and the trainer. With many engines the latency of a single trajectory limits the
step, and another engine has no effect. With few engines their throughput limits the step. Training
has a fixed part, and a part divided among its workers. No split makes a step shorter than the CPU
time of the host's processes over its cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from meshrl.common.state.pool.demand.measurements import DecodeCurve, LengthQuantiles
from meshrl.services.planner.forecast.engine_curves import average_by_steps
from meshrl.services.planner.forecast.step_quantities import (
    StepDemand,
    StepRates,
    StepTerms,
    WorkerSplit,
    compute_slice_shares,
    predict_gradients_s,
)
from meshrl.services.planner.forecast.step_simulation import simulate_step_s, simulate_token_s
from meshrl.services.planner.forecast.work_account import WorkWindow

MAX_PAUSED_SHARE = 0.9  # maximum share of a step in which slices of the core pause an engine
MAX_CORE_SHARE = 0.95  # maximum share of a host's cores that its processes keep busy
MODEL_ERROR = 0.1  # usual error of the model, as a share of a step


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """Seconds of a step and of its stages."""

    rollout_s: float
    train_s: float
    host_s: float  # if all the host's cores were busy; 0: not known
    step_s: float

    @property
    def bottleneck(self) -> str:
        """Stage with the longest time: rollout, training or cores."""
        if self.host_s >= max(self.rollout_s, self.train_s):
            return "cores"
        return "rollout" if self.rollout_s >= self.train_s else "training"

    def to_event(self) -> dict[str, float]:
        """Return the prediction as the fields of an event, in seconds."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def measure_demand(
    window: WorkWindow, terms: StepTerms, lengths: LengthQuantiles | None = None
) -> StepDemand | None:
    """Measure the demand of a step of the window; return None if too few trajectories ended."""
    work = window.work
    if min(work.groups, work.trajectories, work.sampled) <= 0:
        return None
    return StepDemand(
        trajectories=terms.groups_per_step * work.trajectories / work.groups,
        sampled_tokens=work.sampled / work.trajectories,
        tool_s=work.tool_s / work.trajectories,
        trained_tokens=work.tokens / window.steps,
        length_quantiles=lengths.sampled_tokens if lengths is not None else (),
    )


def measure_rates(
    window: WorkWindow,
    demand: StepDemand,
    terms: StepTerms,
    split: WorkerSplit,
    curves: Sequence[DecodeCurve],
    core_share: float,
) -> StepRates | None:
    """Measure the rates of the window's work, whose demand per step is `demand`, with this split.
    Return None if the window has too little work.
    """
    work = window.work
    if min(work.sampled, work.engine_s, work.busy_s) <= 0 or not split.engines:
        return None
    alone_s = work.work_s / window.steps
    busy_s = (work.busy_s - work.held_s) / window.steps
    curve = average_curve(curves, demand.sampled_tokens / 2)
    batch = min(work.engine_s / window.seconds / split.engines, float(terms.engine_slots))
    # Measured times of engines and a core that share workers contain each other's slices.
    slowdown = 1.0
    if split.shared_engines:
        paused_s = alone_s / split.trainers * split.shared_engines / split.engines
        slowdown = 1.0 - min(MAX_PAUSED_SHARE, paused_s / window.step_s)
        if terms.max_staleness:
            busy_s *= compute_slice_shares(alone_s, demand.trained_tokens, terms).core
    return StepRates(
        curve=curve,
        friction=slowdown * work.engine_s / work.sampled / curve.predict_step_s(batch),
        gradient_s=alone_s,
        fixed_s=max(
            0.0,
            busy_s - predict_gradients_s(alone_s, split.trainers, demand.trained_tokens, terms),
        ),
        core_share=core_share,
    )


def calibrate_friction(
    window: WorkWindow, demand: StepDemand, rates: StepRates, split: WorkerSplit, terms: StepTerms
) -> StepRates:
    """Return the rates with the friction for which the simulation of the split has the measured
    seconds of a token.

    The mean batch of a window is too small where engines idle between bursts, as beside a slow
    trainer, or pause for slices of the core.
    """
    if not window.steps:
        return rates
    measured_s = window.work.engine_s / window.work.sampled
    simulated_s = simulate_token_s(demand, replace(rates, friction=1.0), split, terms)
    return replace(rates, friction=measured_s / simulated_s)


def predict_step(
    demand: StepDemand, rates: StepRates, split: WorkerSplit, terms: StepTerms, step_s: float
) -> StepPrediction:
    """Predict the seconds of a step of this demand with another split. `step_s` was measured with
    the rates; the host's cores were busy for their share of it.
    """
    return StepPrediction(
        rollout_s=simulate_step_s(
            demand, replace(rates, gradient_s=0.0, fixed_s=0.0), split, terms
        ),
        train_s=rates.fixed_s
        + predict_gradients_s(rates.gradient_s, split.trainers, demand.trained_tokens, terms),
        host_s=_predict_host_s(rates, step_s),
        step_s=predict_step_s(demand, rates, split, terms, step_s),
    )


def predict_step_s(
    demand: StepDemand, rates: StepRates, split: WorkerSplit, terms: StepTerms, step_s: float
) -> float:
    """Predict only the total seconds of a step."""
    return max(simulate_step_s(demand, rates, split, terms), _predict_host_s(rates, step_s))


def correct_prediction(
    model_s: float, current_model_s: float, measured_s: float, relative_error: float
) -> float:
    """Correct the prediction `model_s` by a measurement of the current split.

    The model predicts `current_model_s` for the split that was measured as `measured_s`, with
    `relative_error`. The measurement and the model are weighed by their uncertainty. The model
    counts as more uncertain than usual if the two differ by more than twice the error. Time that
    the model lacks is added unchanged. Time that the model has in excess is removed in proportion.
    """
    log_error = math.log(measured_s / current_model_s)
    off = max(MODEL_ERROR**2, log_error**2 - (2 * relative_error) ** 2)
    here_s = current_model_s * math.exp(log_error * off / (off + relative_error**2))
    return (
        model_s + here_s - current_model_s
        if here_s > current_model_s
        else model_s * here_s / current_model_s
    )


def _predict_host_s(rates: StepRates, step_s: float) -> float:
    return step_s * rates.core_share / MAX_CORE_SHARE


def scale_rates(rates: StepRates, new_demand: StepDemand, measured_demand: StepDemand) -> StepRates:
    """Scale the rates to another demand: gradient time is proportional to trained tokens."""
    ratio = (
        new_demand.trained_tokens / measured_demand.trained_tokens
        if measured_demand.trained_tokens > 0 and new_demand.trained_tokens > 0
        else 1.0
    )
    return replace(rates, gradient_s=rates.gradient_s * ratio)


def average_curve(curves: Sequence[DecodeCurve], context: float = 0.0) -> DecodeCurve:
    """Average the curves for sequences with `context` tokens. Without a valid curve return a
    constant step time, so that latency alone limits the step.
    """
    known = [curve for curve in curves if curve.fitted_steps > 0 and curve.base_s >= 0]
    if not known:
        return DecodeCurve("", 1, 1.0)
    found = average_by_steps(known)
    sequence_s = found.sequence_s + context * found.context_s
    if found.base_s + sequence_s <= 0:
        return DecodeCurve("", 1, 1.0)
    return replace(found, sequence_s=sequence_s, context_s=0.0, prefill_tokens_per_s=0.0)
