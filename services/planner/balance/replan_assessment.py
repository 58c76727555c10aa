"""Assessment of a job for another split: its window of measurements, and the trigger of a plan. The
policies of engines of one worker and of several workers use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import FinishMove
from meshrl.services.planner.balance import triggers
from meshrl.services.planner.balance.split_state import SplitState
from meshrl.services.planner.balance.trials import Trial
from meshrl.services.planner.forecast.engine_curves import MIN_CURVE_STEPS
from meshrl.services.planner.forecast.prediction import (
    MODEL_ERROR,
    StepPrediction,
    calibrate_friction,
    correct_prediction,
    measure_demand,
    measure_rates,
    predict_step,
    predict_step_s,
)
from meshrl.services.planner.forecast.step_quantities import (
    StepDemand,
    StepRates,
    StepTerms,
    WorkerSplit,
)
from meshrl.services.planner.forecast.work_account import StepTotals, WorkWindow
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import JobInstances

DEFAULT_SWITCH_S = 3.0  # seconds of a move before one is measured: start of a role process
SWITCH_WEIGHT = 0.3  # weight of the last move in the mean move time
MIN_WINDOW_STEPS = 2  # steps of a window by which a split is planned;
MIN_EARLY_GAIN = 0.2  # minimum share of a step saved by a move that is decided on fewer steps
IMBALANCE_CHANGE_FACTOR = 1.5  # times the imbalance of a failed move, from which it is tried again


@dataclass(frozen=True, slots=True)
class ReplanInputs:
    """Inputs of the search for another split of a job."""

    window: WorkWindow  # has no steps before the first is measured
    relative_error: float  # standard error of the mean step time, as a share of it
    demand: StepDemand
    rates: StepRates
    prediction: StepPrediction  # of the current split
    trigger: str

    @property
    def step_s(self) -> float:
        """Seconds of a step: measured, or else predicted."""
        return self.window.step_s if self.window.steps else self.prediction.step_s

    @property
    def current_step_s(self) -> float:
        """Seconds of a step with the current split: the measured time, reduced as far as the model
        supports.
        """
        believed_s = correct_prediction(
            self.prediction.step_s, self.prediction.step_s, self.step_s, self.relative_error
        )
        return min(self.step_s, believed_s)

    def predict_step_s(self, split: WorkerSplit, terms: StepTerms) -> float:
        """Predict the seconds of a step with another split."""
        model_s = predict_step_s(self.demand, self.rates, split, terms, self.step_s)
        return correct_prediction(model_s, self.prediction.step_s, self.step_s, self.relative_error)

    def calibrate(self, split: WorkerSplit, terms: StepTerms) -> ReplanInputs:
        """Return the inputs with rates whose simulation of the current split has the measured
        seconds of a token.
        """
        rates = calibrate_friction(self.window, self.demand, self.rates, split, terms)
        prediction = predict_step(self.demand, rates, split, terms, self.step_s)
        return replace(self, rates=rates, prediction=prediction)

    def build_figures(self, job: PlannedJob, after: WorkerSplit, after_s: float) -> dict[str, Any]:
        """Build the figures that explain a move to another split."""
        model = self.prediction
        then = predict_step(self.demand, self.rates, after, build_step_terms(job), self.step_s)
        return model.to_event() | {
            "rollout_s": model.rollout_s,
            "train_s": model.train_s,
            "before_s": round(self.step_s, 4),
            "trigger": self.trigger,
            "predicted_s": round(after_s, 4),
            "then_rollout_s": round(then.rollout_s, 4),
            "then_train_s": round(then.train_s, 4),
            "step": job.steps_done,
        }

    def create_trial(
        self,
        job: PlannedJob,
        state: SplitState,
        rule: str,
        instance: str,
        after: WorkerSplit,
        after_s: float,
        moved_workers: int,
    ) -> Trial:
        """Create the trial of a move to another split. `instance` is the first new instance."""
        assert state.split is not None
        trial = Trial(
            rule,
            instance,
            state.split,
            after,
            job.steps_done,
            self.step_s,
            after_s,
            1.0,
            self.demand,
            self.rates,
            moved_workers,
            self.relative_error,
        )
        return replace(trial, bias=state.bias.get(trial.direction, 1.0))


def assess_job(
    draft: PoolDraft, job: PlannedJob, state: SplitState, totals: StepTotals
) -> tuple[SplitState, ReplanInputs | None]:
    """Assess a job: return its split state, and the inputs of a plan if a trigger fires. The inputs
    are None during a cooldown or a move.
    """
    team, config, terms, split = (
        draft.get_instances(job.id),
        job.config,
        build_step_terms(job),
        state.split,
    )
    window = state.compute_window(totals, MIN_WINDOW_STEPS)
    assert split is not None
    finished_ids = {d.move.id for d in draft.decisions if isinstance(d, FinishMove)}
    moving = {one.gang for one in draft.snapshot.moves if one.id not in finished_ids}
    if window is None or any(one.gang in moving for one in team.placements):
        return state, None
    now, cores = (
        measure_demand(window, terms, job.measurements.lengths),
        compute_busiest_host_share(draft, team),
    )
    found = (
        measure_rates(window, now, terms, split, select_curves(job, state), cores) if now else None
    )
    if now is None or found is None or window.step_s <= 0:
        return record_explanation(state, None, "too few measurements exist"), None
    model = predict_step(now, found, split, terms, window.step_s)
    for (
        towards,
        then,
    ) in state.failed_imbalance.items():  # the job has changed since the failed move
        change = compute_imbalance(model) / max(then, 1e-9)
        if change >= IMBALANCE_CHANGE_FACTOR or change <= 1 / IMBALANCE_CHANGE_FACTOR:
            state = replace(state, failed_moves={**state.failed_moves, towards: 0})
    rejected, since_planned = (
        job.rejected_trajectories - state.rejected_at_plan,
        totals.step - state.last_plan_step,
    )
    pressing = triggers.find_trigger(window, split, terms, model, config, rejected, since_planned)
    failures = max(state.failed_moves.values(), default=0)
    since = totals.step - state.last_move_step if state.last_move_step is not None else None
    if why := triggers.explain_cooldown(job.steps_done, since, config, failures):
        return record_explanation(state, model, why, window), None
    if not pressing:
        return record_explanation(
            state, model, "no measurement requires another split", window
        ), None
    state = replace(state, last_plan_step=totals.step, rejected_at_plan=job.rejected_trajectories)
    first = state.window_start.step if state.window_start is not None else totals.step
    error = state.step_ends.estimate_mean_error(first, totals.step)
    return state, ReplanInputs(window, error, now, found, model, pressing)


def explain_move_rejection(
    job: PlannedJob,
    state: SplitState,
    instances: JobInstances,
    inputs: ReplanInputs,
    after_s: float,
    direction: str,
    moved_workers: int,
    min_gain: float = MODEL_ERROR,
) -> str:
    """Explain why a move of `moved_workers` to a step of `after_s` is rejected; empty: it is
    made. `min_gain`: minimum saving, as a share of a step.
    """
    window, config, step_s = inputs.window, job.config, inputs.current_step_s
    remaining_steps = job.total_steps - job.steps_done if job.total_steps else 1 << 30
    switch_s = (
        (state.switch_s or DEFAULT_SWITCH_S) * moved_workers / max(1, instances.awake_worker_count)
    )
    saved_s = step_s - after_s
    if window.steps < config.window_steps and saved_s < MIN_EARLY_GAIN * step_s:
        return f"{window.steps} steps are too few for a decision"
    failures = state.failed_moves.get(direction, 0)
    why = triggers.explain_insufficient_gain(
        saved_s, step_s, config, failures, remaining_steps, switch_s, min_gain
    )
    return f"{moved_workers} more to {direction}: {why}" if why else ""


def build_step_terms(job: PlannedJob) -> StepTerms:
    """Return the terms of a step from the job file."""
    return StepTerms(
        job.groups_per_step,
        job.group_size,
        job.max_staleness,
        job.slots,
        job.bin_tokens,
        job.requirements.ranks,
        job.gradient_transfer_s,
        job.slice_switch_s,
    )


def read_split(draft: PoolDraft, job: PlannedJob) -> WorkerSplit:
    """Return the current split of a job's workers."""
    instances = draft.get_instances(job.id)
    one_degree = job.requirements.tensor_parallel == (1,)
    shared = len(instances.time_sliced_engines) if one_degree else 0
    core = instances.core
    there = {
        seated.instance.job
        for worker in (core.workers if core is not None else ())
        for seated in draft.list_awake_on(worker)
    }
    degrees: tuple[int, ...] = ()
    if job.requirements.tensor_parallel != (1,):
        degrees = tuple(sorted((len(one.workers) for one in instances.engines), reverse=True))
    return WorkerSplit(
        len(instances.engines) + shared,
        job.requirements.ranks + len(instances.hybrids),
        degrees,
        shared_engines=shared,
        companions=len(there - {job.id}),
    )


def record_move_times(draft: PoolDraft, job: PlannedJob, state: SplitState) -> SplitState:
    """Record the durations of the job's moves that completed by this snapshot."""
    for one in draft.decisions:
        if (
            isinstance(one, FinishMove)
            and not one.undone
            and one.move.rollback.get("job") == job.id
        ):
            took_s = (draft.snapshot.now_ms - one.move.started_ms) / 1000
            known = state.switch_s
            state = replace(
                state, switch_s=known + SWITCH_WEIGHT * (took_s - known) if known else took_s
            )
    return state


def compute_imbalance(model: StepPrediction) -> float:
    """Return the rollout time over the training time."""
    return model.rollout_s / max(model.train_s, 1e-9)


def record_explanation(
    state: SplitState, model: StepPrediction | None, verdict: str, window: WorkWindow | None = None
) -> SplitState:
    """Return the split state with the prediction and the verdict for display."""
    found: dict[str, Any] = dict(state.explanation)
    if model is not None and window is not None and window.steps:
        found |= model.to_event()
        found |= {"bottleneck": model.bottleneck, "measured_s": round(window.step_s, 4)}
    errors = [one.relative_error for one in state.verdicts]
    found |= {"verdict": verdict, "median_error": round(median(errors), 4) if errors else None}
    return replace(state, explanation=found)


def select_curves(job: PlannedJob, state: SplitState) -> Sequence[DecodeCurve]:
    """Select the measured curves of the job's engines. While all engines are new, select the last
    known curves.
    """
    sure = [curve for curve in job.measurements.curves if curve.fitted_steps >= MIN_CURVE_STEPS]
    return sure or list(state.curves.values()) or job.measurements.curves


def compute_busiest_host_share(draft: PoolDraft, instances: JobInstances) -> float:
    """Return the share of busy cores of the job's busiest host; 0: not known."""
    there = {
        draft.workers[worker].host for seated in instances.placements for worker in seated.workers
    }
    hosts = [host for host in draft.snapshot.hosts if host.name in there and host.cores > 0]
    return max((min(1.0, host.busy_cores / host.cores) for host in hosts), default=0.0)
