"""Checks of the algorithm's keys of a job file."""

from __future__ import annotations

from meshrl.common.job.correction_bounds import get_weight_bounds
from meshrl.job.job_file import JobFile

REWARDLESS_ALGORITHMS = ("sft", "distill")  # algorithms that learn from something else


def check_algorithm(job: JobFile) -> None:
    """Check that the values fit together."""
    chosen = job.config.algorithm
    if chosen.updates > chosen.groups_per_step:
        raise job.make_error(
            "algorithm.updates",
            "algorithm.updates exceeds the groups of a step, algorithm.groups_per_step",
        )
    if chosen.overlong_buffer > job.config.rollout.max_tokens:
        raise job.make_error(
            "algorithm.overlong_buffer", "algorithm.overlong_buffer exceeds rollout.max_tokens"
        )
    if chosen.name in REWARDLESS_ALGORITHMS and chosen.kl_coefficient and chosen.kl_in == "reward":
        raise job.make_error(
            "algorithm.kl_in",
            f"{chosen.name} has no reward from which to subtract a divergence",
            "Set algorithm.kl_in to 'loss'",
        )
    _check_correction(job)


def _check_correction(job: JobFile) -> None:
    chosen = job.config.algorithm
    if job.config.is_supervised and chosen.correction != "none":
        wrong = (
            f"{chosen.name} trains on answers that no policy sampled: a correction does not apply"
        )
        raise job.make_error("algorithm.correction", wrong, "Set algorithm.correction to 'none'")
    low, high = get_weight_bounds(chosen)
    if high < low:
        bound = "low" if chosen.correction_high < 0 else "high"
        wrong = f"the largest weight of a correction, {high:g}, is below the lowest, {low:g}"
        fix = "Raise algorithm.correction_high, or lower algorithm.correction_low"
        raise job.make_error(f"algorithm.correction_{bound}", wrong, fix)
