"""First plan of a job, made when its first groups have finished, before a step is measured.

Engines and shards have measured their part by then. The training time is predicted
(`costs/training_prediction.py`). So a job with a poor default split need not make many steps before
it is corrected. Later measurements judge the plan.
"""

from __future__ import annotations

from dataclasses import replace

from meshrl.common.state.pool.demand.measurements import parse_accelerator_kind
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.store.planner_reports import OPENING
from meshrl.services.planner.balance.replan_assessment import (
    ReplanInputs,
    build_step_terms,
    compute_busiest_host_share,
    select_curves,
)
from meshrl.services.planner.balance.split_state import SplitState
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.costs.training_prediction import (
    TrainingQuery,
    predict_corrected_training,
)
from meshrl.services.planner.forecast.prediction import average_curve, predict_step
from meshrl.services.planner.forecast.step_quantities import StepDemand, StepRates
from meshrl.services.planner.forecast.work_account import StepTotals, WorkWindow
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import JobInstances

MIN_FINISHED_SHARE = 2 / 3  # share of the admitted trajectories


def is_initial_plan_due(job: PlannedJob, state: SplitState, totals: StepTotals) -> bool:
    """Return True if enough trajectories have finished, and no step is measured yet."""
    if state.split is None or state.trial is not None or state.last_move_step is not None:
        return False
    if state.compute_window(totals, 1) is not None or totals.work.sampled <= 0:
        return False
    # Short trajectories end first. The share is large enough that long trajectories
    # are among the finished ones.
    terms, work = build_step_terms(job), totals.work
    admits = (1 + terms.max_staleness) * terms.groups_per_step * terms.group_size
    return work.trajectories >= MIN_FINISHED_SHARE * admits and work.groups >= terms.groups_per_step


def prepare_initial_plan(
    draft: PoolDraft, job: PlannedJob, state: SplitState, totals: StepTotals, correction: Correction
) -> ReplanInputs | None:
    """Build the inputs of a job's first plan. Return None if its training cannot be predicted, or
    if no engine has measured its curve.
    """
    terms, work, split = build_step_terms(job), totals.work, state.split
    assert split is not None
    team, lengths = draft.get_instances(job.id), job.measurements.lengths
    curves = [one for one in select_curves(job, state) if one.fitted_steps > 0]
    query = build_training_query(draft, job, team)
    if lengths is None or not curves or query is None or not split.engines:
        return None
    trajectories = float(terms.groups_per_step * terms.group_size)
    sampled = work.sampled / work.trajectories
    now = StepDemand(
        trajectories=trajectories,
        sampled_tokens=sampled,
        tool_s=work.tool_s / work.trajectories,
        trained_tokens=trajectories * (work.prompted / work.trajectories + sampled),
        length_quantiles=lengths.sampled_tokens,
    )
    training = predict_corrected_training(query, trajectories, now.trained_tokens, correction)
    if training is None:
        return None
    rates = StepRates(
        curve=average_curve(curves, sampled / 2),
        friction=1.0,
        gradient_s=training.gradient_s,
        fixed_s=training.fixed_s,
        core_share=0.0,
    )
    model = predict_step(now, rates, split, terms, 0.0)
    rates = replace(rates, core_share=compute_busiest_host_share(draft, team))
    model = predict_step(now, rates, split, terms, model.step_s)
    return ReplanInputs(WorkWindow(0, 0.0, work), 0.0, now, rates, model, OPENING)


def build_training_query(
    draft: PoolDraft, job: PlannedJob, instances: JobInstances
) -> TrainingQuery | None:
    """Build the query that predicts a job's training; return None without a core."""
    if instances.core is None:
        return None
    accelerator = draft.workers[instances.core.workers[0]].accelerator
    return TrainingQuery(
        job.model_key, parse_accelerator_kind(accelerator), job.model_shape, job.emulated_training
    )
