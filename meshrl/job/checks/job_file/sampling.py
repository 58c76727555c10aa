"""Checks of a job file's keys that change the distribution from which tokens are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from meshrl.common.job import sampling_keys
from meshrl.job.job_file import JobFile


def check_sampling(job: JobFile) -> None:
    """Check that sampling parameters fit the engine, the lengths and the algorithm."""
    rollout, chosen = job.config.rollout, job.config.algorithm
    if rollout.min_tokens >= rollout.max_tokens:
        wrong = (
            f"rollout.min_tokens = {rollout.min_tokens} leaves no room for an end before "
            f"rollout.max_tokens = {rollout.max_tokens}, which counts the prompt too"
        )
        raise job.make_error("rollout.min_tokens", wrong, "Lower rollout.min_tokens")
    penalties = _list_used(job, sampling_keys.PENALTIES)
    if penalties and rollout.engine == "sglang":
        raise job.make_error(
            penalties[0],
            f"SGLang applies {penalties[0]} only to a part of a turn that moves or pauses, or "
            "not at all",
            "Remove the key, or set rollout.engine to the built-in engine",
        )
    used = _list_used(job, sampling_keys.ALL)
    if not used or job.config.is_supervised or not job.config.budget.steps:
        return
    if chosen.correction == "none":
        raise job.make_error(
            used[0],
            f"with {used[0]} probability ratios would not start at 1, and would be clipped: the "
            "trained policy is not what tokens are sampled from",
            f"Set algorithm.correction, for example to 'tis', or remove {used[0]}",
        )
    if chosen.kl_coefficient and chosen.kl_in == "reward":
        wrong = f"with {used[0]} a divergence in the reward would include the change of sampling"
        raise job.make_error(used[0], wrong, f"Set algorithm.kl_in to 'loss', or remove {used[0]}")


def _list_used(job: JobFile, neutral_values: Mapping[str, Any]) -> list[str]:
    found = sampling_keys.list_changed(asdict(job.config.rollout), neutral_values)
    return [f"rollout.{name}" for name in found]
