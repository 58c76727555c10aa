"""The conditions under which a job's split is planned anew (Libra's triggers, arXiv 2606.03077).

Its defaults are those of the released code: every ten steps, or at once when requests queue for
engines, when engines are full, when groups come back too old, or when one stage takes longer than
the other. Nothing is planned before the warm-up is over, and nothing for a while after a move.
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
    """The trigger that asks for a plan, by name; empty: none. `rejected` are the trajectories that
    came back too old since the last one, `since_planned` the steps since then.
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
    """Why nothing is planned now, whatever presses; empty: something may be. `since` are the steps
    since the last move. Moves that did not pay make the rest longer.
    """
    if step <= config.warmup_steps:
        return f"the first {config.warmup_steps} steps are not over"
    rest = config.cooldown_steps << min(failures, 4)
    if steps_since_move is not None and steps_since_move < rest:
        return f"the last move was {steps_since_move} steps ago, and {rest} are waited"
    return ""


def explain_insufficient_gain(
    gain_s: float,
    step_s: float,
    config: PlannerConfig,
    failures: int,
    remaining_steps: int,
    switch_s: float,
) -> str:
    """Why a plan is not applied that saves `gain_s` of each step, with `left` steps to go; empty:
    it is. No less is asked than predictions are off by, and twice as much for each move of the kind
    that did not pay.
    """
    asked = max(config.gain, MODEL_ERROR) * (1 << min(failures, 4))
    if gain_s < asked * step_s:
        return f"it would save {gain_s / step_s:.1%} of a step, and {asked:.0%} are asked"
    if gain_s * remaining_steps <= switch_s:
        return (
            f"it would save {gain_s * remaining_steps:.1f} s until the end, and take "
            f"{switch_s:.1f} s"
        )
    return ""
