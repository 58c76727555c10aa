"""Calibration of the cost model by measurements: of the degrees of engines, and of training on one
worker. Both correct the predictions of all jobs of the same model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.services.planner.balance.initial_plan import build_training_query
from meshrl.services.planner.balance.split_state import SplitState
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.costs.training_prediction import TrainingQuery, predict_training
from meshrl.services.planner.forecast import engine_curves
from meshrl.services.planner.forecast.work_account import build_window
from meshrl.services.planner.pool.draft import PoolDraft


def record_measurements(
    draft: PoolDraft,
    job: PlannedJob,
    previous: SplitState,
    state: SplitState,
    correction: Correction,
) -> SplitState:
    """Return the split state with the measurements since `previous`, for display."""
    explanation: dict[str, Any] = {}
    curves = engine_curves.update_curves(state.curves, job.measurements.curves)
    if curves is not state.curves and (
        comparison := engine_curves.compare_with_predictions(curves, job, correction)
    ):
        explanation["degrees"] = comparison
    if trained := _compare_training(draft, job, previous, state):
        query, predicted_s, observed_s = trained
        explanation["training"] = {
            "kind": query.kind,
            "predicted_s": float(f"{correction.correct(query.key, predicted_s):.4g}"),
            "observed_s": float(f"{observed_s:.4g}"),
            "error": round(correction.compute_error(query.key), 4),
        }
    if curves is state.curves and not explanation:
        return state
    return replace(state, curves=curves, explanation=dict(state.explanation) | explanation)


def update_correction(
    correction: Correction,
    draft: PoolDraft,
    jobs: Iterable[PlannedJob],
    previous: Mapping[str, SplitState],
    after: Mapping[str, SplitState],
) -> Correction:
    """Return the correction updated by the new measurements of all jobs."""
    for job in jobs:
        known, watch = previous.get(job.id, SplitState()), after.get(job.id)
        if watch is None:
            continue
        if watch.curves != known.curves:
            correction = engine_curves.update_correction(
                correction, job, known.curves, watch.curves
            )
        if trained := _compare_training(draft, job, known, watch):
            query, predicted_s, observed_s = trained
            correction = correction.observe(query.key, predicted_s, observed_s)
    return correction


def _compare_training(
    draft: PoolDraft, job: PlannedJob, previous: SplitState, state: SplitState
) -> tuple[TrainingQuery, float, float] | None:
    """Compare predicted and measured gradient seconds of a step on one worker. Return the query,
    the predicted and the observed seconds; None without a new window or a prediction.
    """
    older, newer = state.window_start, state.next_window_start
    if older is None or newer is None or newer == previous.next_window_start:
        return None
    window, query = (
        build_window(older, newer),
        build_training_query(draft, job, draft.get_instances(job.id)),
    )
    if window is None or query is None:
        return None
    sequences, tokens = (n / window.steps for n in (window.work.trajectories, window.work.tokens))
    prediction = predict_training(query, sequences, tokens)
    if prediction is None:
        return None
    return query, prediction.gradient_s, window.work.work_s / window.steps
