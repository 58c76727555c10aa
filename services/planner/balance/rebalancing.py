"""Balance of rollout and training workers of a job, and the verdict on the last move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale, ReportMoveOutcome
from meshrl.common.state.pool.store.planner_reports import OPENING, STAGE_TIME
from meshrl.common.state.pool.workers.rows import Role
from meshrl.services.planner.balance import trials
from meshrl.services.planner.balance.calibration import record_measurements
from meshrl.services.planner.balance.colocation import change_mode, find_other_mode
from meshrl.services.planner.balance.initial_plan import is_initial_plan_due, prepare_initial_plan
from meshrl.services.planner.balance.replan_assessment import (
    MIN_WINDOW_STEPS,
    ReplanInputs,
    assess_job,
    build_step_terms,
    compute_busiest_host_share,
    compute_imbalance,
    explain_move_rejection,
    read_split,
    record_explanation,
    record_move_times,
    select_curves,
)
from meshrl.services.planner.balance.reshaping import advance_reshape, plan_reshape, start_restore
from meshrl.services.planner.balance.split_state import SplitState
from meshrl.services.planner.balance.trials import COLOCATED, SPLIT, TrialEvidence, Verdict
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.forecast.prediction import (
    MODEL_ERROR,
    measure_demand,
    measure_rates,
    predict_step,
)
from meshrl.services.planner.forecast.step_quantities import WorkerSplit
from meshrl.services.planner.forecast.work_account import StepTotals, WorkWindow, build_window
from meshrl.services.planner.policies.hybrid_transfers import describe_hybrid_transfer
from meshrl.services.planner.policies.role_moves import move_worker
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import InstancePlacement, JobInstances

UNDO_RULE = "unpaid"
SIMULATION_INTERVAL_MS, MAX_SIMULATED_JOBS = (
    3000,
    4,
)  # interval between two simulations of a job's steps; jobs per pass
TIE_RATIO = 0.99  # maximum step time, relative to a split that moves fewer workers
EXTRAPOLATION_PENALTY = 0.1  # uncertainty per e-fold of engines, as a share of a step


class SimulationBudget:
    """Limit of the jobs whose steps are simulated in one pass, as each simulation takes time."""

    def __init__(self, now_ms: int) -> None:
        self._now_ms, self._remaining_jobs = now_ms, MAX_SIMULATED_JOBS

    def take(self, state: SplitState) -> SplitState | None:
        """Use one simulation of the budget for a job; return its state, marked as simulated now.

        Return None if the budget is used up, or the job was simulated too recently.
        """
        if not self._remaining_jobs or self._now_ms - state.simulated_ms < SIMULATION_INTERVAL_MS:
            return None
        self._remaining_jobs -= 1
        return replace(state, simulated_ms=self._now_ms)


def balance_job(
    draft: PoolDraft,
    job: PlannedJob,
    state: SplitState,
    correction: Correction,
    simulation_budget: SimulationBudget,
) -> SplitState:
    """Balance a job: move engines or hybrids, or reshape engines, if a shorter step is predicted.

    Moves that did not pay are undone. `correction` corrects predicted curves; `simulation_budget`
    limits the jobs whose steps are simulated. Return the split state to remember.
    """
    known = state
    team, config, several = (
        draft.get_instances(job.id),
        job.config,
        job.requirements.tensor_parallel != (1,),
    )
    if not job.requirements.allows_hybrids:
        for seated in [one for one in team.hybrids if not one.instance.pinned]:
            why = Rationale("unhelped", job.id)  # the core accepts no gradients of hybrids
            draft.remove_instance(seated, why)
            if job.requirements.smallest_engine == 1:
                draft.place_instance(seated.workers, job.id, Role.ROLLOUT, why)
        if not several and not job.requirements.can_time_slice:
            return state
    state = record_move_times(draft, job, state)
    if (
        job.phase != Phase.TRAINING
        or job.block_reason
        or team.core is None
        or not team.core.is_awake
    ):
        return state.reset_window() if state.window_start is not None else state
    if state.desired_shape is not None:
        if several and config.moves:
            state = advance_reshape(draft, job, state, round(state.account.total.steps))
        else:
            state = replace(state, desired_shape=None, trial=None)
    if draft.snapshot.now_ms - state.observed_ms < 1000 * config.interval_s:
        return state
    account = state.account.credit(job.measurements)
    mark = StepTotals(round(account.total.steps), draft.snapshot.now_ms, account.total)
    split, terms = read_split(draft, job), build_step_terms(job)
    state = replace(state, observed_ms=mark.at_ms)
    if (
        config.moves
        and not several
        and is_initial_plan_due(job, state, mark)
        and (charged_state := simulation_budget.take(state))
    ):
        state = charged_state
        found = prepare_initial_plan(draft, job, state, mark, correction)
        if found is not None:
            state = _plan_shift(draft, job, state, mark, found, OPENING)
            if state.trial is not None:
                return state
    if state.step_ends.last_step == mark.step and split.is_same(state.split):
        return state  # counts of half a step are not comparable with others
    state = replace(state, account=account)
    state = state.record_totals(mark, split, terms.max_staleness, config.window_steps)
    state = record_measurements(draft, job, known, state, correction)
    if cost := describe_hybrid_transfer(job):
        state = replace(state, explanation=dict(state.explanation) | {"hybrid_cost": cost})
    if not config.moves or state.desired_shape is not None:
        return state
    if state.trial is not None:
        return _judge_trial(draft, job, state, mark, simulation_budget)
    charged_state = (
        simulation_budget.take(state)
        if state.compute_window(mark, MIN_WINDOW_STEPS) is not None
        else None
    )
    if charged_state is None:
        return state
    state, found = assess_job(draft, job, charged_state, mark)
    if found is None:
        return state
    if several:
        return plan_reshape(draft, job, state, mark, found, correction)
    return _plan_shift(draft, job, state, mark, found)


# -- measured effect of a move -----------------------------------------------------------------


def _judge_trial(
    draft: PoolDraft,
    job: PlannedJob,
    state: SplitState,
    totals: StepTotals,
    simulation_budget: SimulationBudget,
) -> SplitState:
    trial, team, terms = state.trial, draft.get_instances(job.id), build_step_terms(job)
    assert trial is not None
    if not trial.split_after.is_same(state.split):
        summary = f"the move of step {trial.step} cannot be assessed: the split has changed since"
        return record_explanation(replace(state, trial=None), None, summary)
    trial = trials.update_trial_window(trial, team.is_reconciled, totals, terms)
    state = replace(state, trial=trial)
    failures = state.failed_moves.get(trial.direction, 0)
    steps = job.config.window_steps * (1 + failures)
    window = build_window(trial.window_start, totals) if trial.window_start is not None else None
    if window is None or not window.is_long_enough(steps) or window.step_s <= 0:
        return state
    charged_state = simulation_budget.take(state)
    if charged_state is None:
        return state
    state = charged_state
    verdict = _compute_verdict(draft, job, state, totals, window, steps)
    if verdict is None:
        return state
    then = predict_step(trial.demand, trial.rates, trial.split_before, terms, 0.0)
    state = state.record_verdict(verdict, compute_imbalance(then), totals.step)
    draft.add_decision(
        ReportMoveOutcome(job.id, verdict.to_event(), Rationale(verdict.rule, job.id))
    )
    if not verdict.paid:
        figures = {"regret_s": round(verdict.regret_s, 4), "step": job.steps_done}
        if trial.direction in (COLOCATED, SPLIT):
            back = SPLIT if trial.direction == COLOCATED else COLOCATED
            state = change_mode(draft, job, state, back, Rationale(UNDO_RULE, job.id, figures))
        if trial.split_before.degrees:
            state = start_restore(draft, job, state, trial.split_before, UNDO_RULE, figures)
        else:
            shifted = trial.split_after.trainers - trial.split_before.trainers
            _apply_shift(draft, job, team, -shifted, UNDO_RULE, figures)
    outcome = "paid off" if verdict.paid else "did not pay off and is undone"
    summary = (
        f"the move of step {verdict.step} to {verdict.direction} {outcome}: "
        f"{verdict.observed_s:.3g} s a step, {verdict.expected_s:.3g} s without it"
    )
    return record_explanation(state, None, summary)


def _compute_verdict(
    draft: PoolDraft,
    job: PlannedJob,
    state: SplitState,
    totals: StepTotals,
    window: WorkWindow,
    steps: int,
) -> Verdict | None:
    trial = state.trial
    assert trial is not None and trial.window_start is not None
    terms, cores = (
        build_step_terms(job),
        compute_busiest_host_share(draft, draft.get_instances(job.id)),
    )
    now = measure_demand(window, terms, job.measurements.lengths)
    if now is None:
        return None
    evidence = TrialEvidence(
        window, now, state.step_ends.estimate_mean_error(trial.window_start.step, totals.step)
    )
    if trial.rule == OPENING:
        measured = measure_rates(
            window, now, terms, trial.split_after, select_curves(job, state), cores
        )
        if measured is None:
            return None  # a prediction is no evidence for itself
        evidence = replace(evidence, rates=measured)
    return trials.judge_trial(trial, evidence, terms, steps)


# -- predicted effect of a move ----------------------------------------------------------------


def _plan_shift(
    draft: PoolDraft,
    job: PlannedJob,
    state: SplitState,
    totals: StepTotals,
    inputs: ReplanInputs,
    rule: str = STAGE_TIME,
) -> SplitState:
    team, split = draft.get_instances(job.id), state.split
    window, model = inputs.window, inputs.prediction
    assert split is not None
    best = _find_best_change(draft, state, job, team, inputs)
    if best is None:
        return record_explanation(state, model, "no other split is predicted to be faster", window)
    after, mode, inputs = best.split, best.mode, best.inputs
    shift = after.trainers - split.trainers
    towards = mode or (Role.TRAINING if shift > 0 else Role.ROLLOUT)
    moved = abs(shift) + (job.requirements.ranks if mode else 0)
    min_gain = job.config.gain if mode else MODEL_ERROR
    if why := explain_move_rejection(
        job, state, team, inputs, best.weighed_s, towards, moved, min_gain
    ):
        return record_explanation(state, model, why, window)
    figures = inputs.build_figures(job, after, best.step_s)
    if mode:
        figures |= {"to": mode}
        state = change_mode(draft, job, state, mode, Rationale(rule, job.id, figures))
        summary = f"the job changes to the {mode} mode"
    else:
        summary = f"workers moved to {towards}: {abs(shift)}"
    assert team.core is not None
    arrived = _apply_shift(draft, job, team, shift, rule, figures)
    instance = (arrived[0] if arrived else team.core).instance.id
    trial = inputs.create_trial(job, state, rule, instance, after, best.step_s, moved)
    return record_explanation(state.record_move(totals.step, trial), model, summary, window)


@dataclass(frozen=True, slots=True)
class SplitChange:
    """Change of a job's split, and of its mode if `mode` is set, with its prediction."""

    split: WorkerSplit
    mode: str  # COLOCATED or SPLIT; empty: unchanged
    step_s: float  # predicted
    weighed_s: float  # and weighed by the distance from the measured number of engines
    inputs: ReplanInputs  # of the prediction


def _find_best_change(
    draft: PoolDraft,
    state: SplitState,
    job: PlannedJob,
    instances: JobInstances,
    inputs: ReplanInputs,
) -> SplitChange | None:
    """Find the split with the shortest predicted step; None if no other one is shorter. Of equally
    good splits the nearest one wins.
    """
    split, terms = state.split, build_step_terms(job)
    assert split is not None
    bases = [("", split, inputs)]
    if (other := find_other_mode(draft, job, state)) is not None:
        bases.append((*other, inputs.calibrate(split, terms)))
    best: SplitChange | None = None
    least_s = inputs.current_step_s
    for mode, base, base_inputs in bases:
        for shift in _list_shifts(job, instances, base):
            after = replace(base, engines=base.engines - shift, trainers=base.trainers + shift)
            if (not shift and not mode) or after.engines < 1:
                continue
            towards = mode or (Role.TRAINING if shift > 0 else Role.ROLLOUT)
            after_s = base_inputs.predict_step_s(after, terms) * state.bias.get(towards, 1.0)
            distance = abs(math.log(after.engines / split.engines))
            weighed_s = after_s * (1 + EXTRAPOLATION_PENALTY * distance)
            if weighed_s < TIE_RATIO * least_s:
                change = SplitChange(after, mode, after_s, weighed_s, base_inputs)
                best, least_s = change, weighed_s
    return best


def _list_shifts(job: PlannedJob, instances: JobInstances, split: WorkerSplit) -> list[int]:
    """List the numbers of workers that can move to training, or to rollout if negative; the
    smallest first.
    """
    if not job.requirements.allows_hybrids:
        return [0]
    engines = min(len(_select_movable(instances.engines)), split.engines - job.config.min_rollout)
    return sorted(range(-len(_select_movable(instances.hybrids)), max(0, engines) + 1), key=abs)


def _apply_shift(
    draft: PoolDraft,
    job: PlannedJob,
    instances: JobInstances,
    shift: int,
    rule: str,
    figures: dict[str, Any],
) -> list[InstancePlacement]:
    """Move the last engines to training, or hybrids to rollout if `shift` is negative. Return the
    new placements.
    """
    others = instances.engines if shift > 0 else instances.hybrids
    role = Role.TRAINING if shift > 0 else Role.ROLLOUT
    leave = _select_movable(others)[::-1][: abs(shift)]
    arrived = []
    for seated in leave:
        sides = {"policy": rule, "from": seated.instance.role, "to": role}
        why = Rationale(rule, job.id, figures)
        arrived.append(move_worker(draft, seated, role, why, sides | figures))
    return arrived


def _select_movable(placements: Sequence[InstancePlacement]) -> list[InstancePlacement]:
    """Return the placements that are not pinned and have one worker."""
    return [s for s in placements if not s.instance.pinned and len(s.workers) == 1]
