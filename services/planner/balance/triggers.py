"""Triggers of a new plan of a job's split (Libra's triggers, arXiv 2606.03077).

The defaults are those of the released code: every ten steps, or at once on an imbalance of stages,
a queue for engines, full engines, or stale groups. Nothing is planned during the warm-up and during
the cooldown after a move.
"""

from __future__ import annotations

from meshrl.common.job.config import PlannerConfig
from meshrl.services.planner.forecast.prediction import MODEL_ERROR, StepPrediction
from meshrl.services.planner.forecast.step_quantities import StepTerms, WorkerSplit
from meshrl.services.planner.forecast.work_account import WorkWindow


def find_trigger(
    window: WorkWindow,
    split: WorkerSplit,
    terms: StepTerms,
    prediction: StepPrediction,
    config: PlannerConfig,
    rejected: int,
    steps_since_plan: int,
) -> str:
    """Return the name of the trigger that fires; empty: none. `rejected` counts stale trajectories
    since the last plan.
    """
    slots = max(1, split.engines) * terms.engine_slots * window.seconds
    shorter, longer = sorted((prediction.rollout_s, prediction.train_s))
    if (longer / shorter if shorter > 0 else 1.0) >= config.imbalance:
        return "imbalance"
    if window.work.queue_s / slots >= config.queue_pressure:
        return "queue"
    if window.work.engine_s / slots >= config.active_pressure:
        return "active"
    if rejected >= config.rejected:
        return "rejected"
    return "interval" if steps_since_plan >= config.every else ""


def explain_cooldown(
    step: int, steps_since_move: int | None, config: PlannerConfig, failures: int
) -> str:
    """Explain why the warm-up or cooldown forbids a plan now; empty: it does not. Each failed move
    doubles the cooldown, at most four times.
    """
    if step <= config.warmup_steps:
        return f"the first {config.warmup_steps} steps have not finished"
    rest = config.cooldown_steps << min(failures, 4)
    if steps_since_move is not None and steps_since_move < rest:
        return f"the last move was {steps_since_move} steps ago, and {rest} steps must pass"
    return ""


def explain_insufficient_gain(
    gain_s: float,
    step_s: float,
    config: PlannerConfig,
    failures: int,
    remaining_steps: int,
    switch_s: float,
    min_gain: float = MODEL_ERROR,
) -> str:
    """Explain why a plan that saves `gain_s` of each step is not applied; empty: it is. The
    required gain is at least `min_gain`, and doubles with each failed move of the kind.
    """
    required_gain = max(config.gain, min_gain) * (1 << min(failures, 4))
    if gain_s < required_gain * step_s:
        return (
            f"it would save {gain_s / step_s:.1%} of a step, and at least "
            f"{required_gain:.0%} is required"
        )
    if gain_s * remaining_steps <= switch_s:
        return (
            f"it would save {gain_s * remaining_steps:.1f} s until the end, and cost "
            f"{switch_s:.1f} s"
        )
    return ""
