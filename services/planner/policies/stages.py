"""The two stage times of a job, from the counters that its processes publish.

An engine that the staleness gate keeps half empty is not slow: its time counts by the share of its
slots that is in use, so that the stage time is that of full engines.
"""

from __future__ import annotations

from common.pool.needs import Counters
from services.planner.policies.allocation import StageTimes

LEAST_STEPS = 2  # between two looks, before the times of them are believed


def times(first: Counters, last: Counters, groups_per_step: int) -> StageTimes | None:
    """Seconds per step of each stage between two looks at the same processes; None until enough
    has been seen.
    """
    steps, groups = last.steps - first.steps, last.groups - first.groups
    if not last.engines or steps < LEAST_STEPS or groups < LEAST_STEPS * groups_per_step:
        return None
    busy_s = (last.occupied_s - first.occupied_s) / last.engines
    return StageTimes(
        rollout_s=busy_s / groups * groups_per_step,
        train_s=(last.train_busy_s - first.train_busy_s) / steps,
    )
