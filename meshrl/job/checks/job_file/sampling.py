"""Checks of a job file's keys that change the distribution from which tokens are sampled."""

from __future__ import annotations

from meshrl.common.job.config import RolloutConfig
from meshrl.job.job_file import JobFile

# Keys whose default leaves the model's distribution unchanged.
FILTERS = ("top_p", "top_k", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "min_tokens")


def check_sampling(job: JobFile) -> None:
    """Check that sampling parameters fit the engine, the lengths and the algorithm."""
    rollout, chosen = job.config.rollout, job.config.algorithm
    if rollout.min_tokens >= rollout.max_tokens:
        wrong = (
            f"rollout.min_tokens = {rollout.min_tokens} leaves no room for an end before "
            f"rollout.max_tokens = {rollout.max_tokens}, which counts the prompt too"
        )
        raise job.make_error("rollout.min_tokens", wrong, "Lower rollout.min_tokens")
    penalties = _list_used(rollout, PENALTIES)
    if penalties and rollout.engine == "sglang":
        raise job.make_error(
            penalties[0],
            f"SGLang applies {penalties[0]} only to a part of a turn that moves or pauses, or "
            "not at all",
            "Remove the key, or set rollout.engine to the built-in engine",
        )
    used = _list_used(rollout, (*FILTERS, *PENALTIES, "logit_bias"))
    if not used or job.config.is_supervised:
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


def _list_used(rollout: RolloutConfig, names: tuple[str, ...]) -> list[str]:
    default = RolloutConfig()
    return [f"rollout.{n}" for n in names if getattr(rollout, n) != getattr(default, n)]
