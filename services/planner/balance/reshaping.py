"""Choice of the degrees of a job's engines by the lengths of its trajectories.

It applies when the job file allows several degrees; a reshape may take several passes. A step waits
for its longest trajectories, token after token. An engine of several workers finishes them sooner,
while single workers finish more of the short ones. The allocation of `layouts/` weighs both. Its
predictions for present gangs are scaled to measurements; its predictions for other gangs are judged
afterwards like any move (`trials.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from meshrl.common.state.pool.demand.measurements import (
    QUANTILES,
    LengthQuantiles,
    parse_accelerator_kind,
)
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import PlaceInstance, Rationale
from meshrl.services.planner.balance import rollout_shapes
from meshrl.services.planner.balance.replan_assessment import (
    ReplanInputs,
    build_step_terms,
    explain_move_rejection,
    record_explanation,
)
from meshrl.services.planner.balance.rollout_shapes import ReshapeOptions, RolloutShape
from meshrl.services.planner.balance.split_state import DesiredShape, SplitState
from meshrl.services.planner.balance.trials import DEGREES_DIRECTION
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.forecast import engine_curves
from meshrl.services.planner.forecast.step_quantities import StepTerms, WorkerSplit
from meshrl.services.planner.forecast.work_account import StepTotals
from meshrl.services.planner.layouts.layout_nodes import MAX_BLOCK, LayoutNode
from meshrl.services.planner.layouts.range_costs import GangServer, RangeCosts
from meshrl.services.planner.policies.engine_placement import reshape_engines
from meshrl.services.planner.policies.hybrid_transfers import can_add_hybrids
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import InstancePlacement, JobInstances

RESHAPE_RULE = "lengths"
DEADLINE_FACTOR = 3  # times the time limit of a move, after which a desired shape is given up
STRAGGLER_TOKEN_SHARE = (
    0.8  # maximum share of a long trajectory left on an engine of the smallest degree
)
STRAGGLER_QUANTILE = 0.985  # quantile of lengths that holds up a step
TIE_RATIO = 0.99  # maximum step time of another shape, relative to the current one


def plan_reshape(
    draft: PoolDraft,
    job: PlannedJob,
    state: SplitState,
    totals: StepTotals,
    inputs: ReplanInputs,
    correction: Correction,
) -> SplitState:
    """Set a desired shape of other degrees and hybrids if it is predicted to pay."""
    team, split, lengths = draft.get_instances(job.id), state.split, job.measurements.lengths
    assert split is not None
    if lengths is None:
        return record_explanation(
            state, inputs.prediction, "no lengths have been measured yet", inputs.window
        )
    ranges = _build_range_costs(draft, job, state, lengths, inputs, correction)
    room = _build_reshape_options(draft, job, team)
    here = rollout_shapes.build_current_shape(ranges, room) if ranges.servers else None
    if here is None or not math.isfinite(here.rollout_s) or here.rollout_s <= 0:
        why = "the speed of its engines has not been measured yet"
        return record_explanation(state, inputs.prediction, why, inputs.window)
    best, after_s = _find_best_shape(job, state, inputs, ranges, room, here, lengths)
    if best == here:
        why = "no other degrees are predicted to be faster"
        return record_explanation(state, inputs.prediction, why, inputs.window)
    after = _predict_split(split, best, here, job.requirements.ranks)
    moved = _count_moved_workers(split, after)
    towards = DEGREES_DIRECTION if after.degrees != split.degrees else "training"
    if why := explain_move_rejection(job, state, team, inputs, after_s, towards, moved):
        return record_explanation(
            state, inputs.prediction, f"{after.description}: {why}", inputs.window
        )
    figures = inputs.build_figures(job, after, after_s) | {"was": split.description}
    state, arrived = _start_reshape(
        draft, job, state, RESHAPE_RULE, best.degrees, best.hybrids, figures
    )
    trial = inputs.create_trial(job, state, RESHAPE_RULE, arrived, after, after_s, moved)
    trial = replace(trial, bias=state.bias.get(towards, 1.0))
    summary = f"{moved} workers become {after.description}"
    return record_explanation(
        state.record_move(totals.step, trial), inputs.prediction, summary, inputs.window
    )


def start_restore(
    draft: PoolDraft,
    job: PlannedJob,
    state: SplitState,
    previous_split: WorkerSplit,
    rule: str,
    figures: dict[str, Any],
) -> SplitState:
    """Set the desired shape to the degrees and hybrids that the job had before."""
    state, _ = _start_reshape(
        draft,
        job,
        state,
        rule,
        previous_split.degrees,
        previous_split.trainers - job.requirements.ranks,
        figures,
    )
    return state


def advance_reshape(draft: PoolDraft, job: PlannedJob, state: SplitState, step: int) -> SplitState:
    """Advance the engines towards the desired shape, and return the new split state."""
    desired_shape = state.desired_shape
    assert desired_shape is not None
    if draft.snapshot.now_ms > desired_shape.deadline_ms:
        failures = dict(state.failed_moves)
        failures[DEGREES_DIRECTION] = failures.get(DEGREES_DIRECTION, 0) + 1
        state = replace(
            state, desired_shape=None, trial=None, failed_moves=failures, last_move_step=step
        )
        return record_explanation(
            state, None, f"{list(desired_shape.degrees)} could not be formed in time"
        )
    why = Rationale(desired_shape.rule, job.id, dict(desired_shape.figures))
    done = reshape_engines(
        draft,
        job,
        desired_shape.degrees,
        hybrids=desired_shape.hybrids,
        rationale=why,
        details=dict(desired_shape.figures),
    )
    return replace(state, desired_shape=None) if done else state


def _start_reshape(
    draft: PoolDraft,
    job: PlannedJob,
    state: SplitState,
    rule: str,
    degrees: tuple[int, ...],
    hybrids: int,
    figures: dict[str, Any],
) -> tuple[SplitState, str]:
    """Set a desired shape. Return the split state, and the id of the first new instance."""
    late_ms = round(1000 * DEADLINE_FACTOR * draft.snapshot.settings.move_timeout_s)
    desired_shape = DesiredShape(rule, degrees, hybrids, draft.snapshot.now_ms + late_ms, figures)
    before = len(draft.decisions)
    state = advance_reshape(draft, job, replace(state, desired_shape=desired_shape), 0)
    moves = (
        d for d in draft.decisions[before:] if isinstance(d, PlaceInstance) and d.move is not None
    )
    arrived = next((one.instance.id for one in moves), "")
    return state, arrived


# -- choice of a shape -------------------------------------------------------------------------


def _find_best_shape(
    job: PlannedJob,
    state: SplitState,
    inputs: ReplanInputs,
    range_costs: RangeCosts,
    options: ReshapeOptions,
    current: RolloutShape,
    lengths: LengthQuantiles,
) -> tuple[RolloutShape, float]:
    """Find the shape with the shortest step, and its seconds. Keep the present shape unless another
    is shorter by more than a tie. Of equally good shapes choose the one that changes least.
    """
    terms, split = build_step_terms(job), state.split
    assert split is not None
    # The layout model predicts another time for the present gangs than was measured. The
    # training time is scaled in proportion, so that both are comparable.
    scale = current.rollout_s / max(inputs.prediction.rollout_s, 1e-9)
    fixed_s, work_s = inputs.rates.fixed_s, inputs.rates.gradient_s

    def train_s(helpers: int) -> float:
        return scale * (fixed_s + work_s / (job.requirements.ranks + helpers))

    best, best_s = current, inputs.current_step_s
    for other in rollout_shapes.list_candidate_shapes(range_costs, options, train_s):
        if other.degrees == current.degrees and other.hybrids == current.hybrids:
            continue
        if not 0 < other.rollout_s < math.inf:
            continue
        towards = DEGREES_DIRECTION if other.degrees != current.degrees else "training"
        after = _predict_split(split, other, current, job.requirements.ranks)
        after_s = inputs.predict_step_s(after, terms) * state.bias.get(towards, 1.0)
        after_s = max(after_s, _predict_straggler_s(inputs, range_costs, other, lengths, terms))
        if after_s < TIE_RATIO * best_s:
            best, best_s = other, after_s
    return best, best_s


def _predict_straggler_s(
    inputs: ReplanInputs,
    range_costs: RangeCosts,
    shape: RolloutShape,
    lengths: LengthQuantiles,
    terms: StepTerms,
) -> float:
    """Predict the minimum seconds of a step where engines have several degrees; 0 for one degree.

    All trajectories begin on engines of the smallest degree, as their lengths are unknown. A long
    trajectory that stays there for most of its tokens holds up the step.
    """
    if len(set(shape.degrees)) == 1:
        return 0.0
    longest = float(np.interp(STRAGGLER_QUANTILE, QUANTILES, lengths.sampled_tokens))
    at_engines = inputs.window.work.engine_s / max(inputs.window.seconds, 1e-9)
    batch = min(float(terms.engine_slots), max(1.0, at_engines / len(shape.degrees)))
    context = lengths.mean_prompt_tokens + longest / 2
    small_s, large_s = (
        max(
            one.curve.predict_step_s(batch, context)
            for one in range_costs.servers
            if one.degree == degree
        )
        for degree in (min(shape.degrees), max(shape.degrees))
    )
    token_s = STRAGGLER_TOKEN_SHARE * small_s + (1 - STRAGGLER_TOKEN_SHARE) * large_s
    return longest * token_s / (terms.max_staleness + 1)


def _predict_split(
    split: WorkerSplit, candidate: RolloutShape, current: RolloutShape, core_ranks: int
) -> WorkerSplit:
    speed = current.rollout_s / candidate.rollout_s
    width = min(1.0, candidate.tokens_per_s / current.tokens_per_s / speed)
    return replace(
        split,
        trainers=core_ranks + candidate.hybrids,
        degrees=candidate.degrees,
        relative_speed=speed,
        relative_width=width,
    )


def _count_moved_workers(before: WorkerSplit, after: WorkerSplit) -> int:
    removed, added = Counter(before.degrees), Counter(after.degrees)
    leave = sum(degree * n for degree, n in (removed - added).items())
    arrive = sum(degree * n for degree, n in (added - removed).items())
    return max(leave, arrive, abs(after.trainers - before.trainers))


def _build_range_costs(
    draft: PoolDraft,
    job: PlannedJob,
    state: SplitState,
    lengths: LengthQuantiles,
    inputs: ReplanInputs,
    correction: Correction,
) -> RangeCosts:
    """Build the costs of a step's trajectories by length, for engines of every degree and kind."""
    team = draft.get_instances(job.id)
    kinds = sorted({_get_accelerator_kind(draft, one) for one in (*team.engines, *team.hybrids)})
    servers = [
        GangServer(curve, engine_curves.compute_kv_capacity((kind, degree), job), job.slots)
        for kind in kinds
        for degree in job.requirements.tensor_parallel
        if degree <= MAX_BLOCK and not degree & (degree - 1)
        if (curve := engine_curves.get_curve((kind, degree), state.curves, job, correction))
    ]
    now = inputs.demand
    groups = rollout_shapes.group_trajectories(
        lengths, now.trajectories, now.tool_s, team.awake_worker_count
    )
    return RangeCosts(servers, groups)


def _build_reshape_options(
    draft: PoolDraft, job: PlannedJob, instances: JobInstances
) -> ReshapeOptions:
    """Count the workers of a job's engines and hybrids, by host and kind of accelerators."""
    engines = [one for one in instances.engines if not one.instance.pinned]
    helpers = [one for one in instances.hybrids if not one.instance.pinned]
    free: Counter[tuple[str, str]] = Counter()
    for seated in (*engines, *helpers):
        for worker in seated.workers:
            about = draft.workers[worker]
            free[parse_accelerator_kind(about.accelerator), about.host] += 1
    nodes = tuple(LayoutNode(kind, f"{host} {kind}", n) for (kind, host), n in sorted(free.items()))
    pinned = [one for one in instances.engines if one.instance.pinned]
    return ReshapeOptions(
        nodes,
        tuple((_get_accelerator_kind(draft, one), len(one.workers)) for one in engines),
        len(helpers),
        tuple((_get_accelerator_kind(draft, one), len(one.workers)) for one in pinned),
        len(instances.hybrids) - len(helpers),
        can_add_hybrids(job),
        job.requirements.smallest_engine,
        job.config.min_rollout,
    )


def _get_accelerator_kind(draft: PoolDraft, placement: InstancePlacement) -> str:
    return parse_accelerator_kind(draft.workers[placement.workers[0]].accelerator)
