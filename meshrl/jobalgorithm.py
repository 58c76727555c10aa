"""What a job file says of its algorithm, checked.

`fail(key, message, fix)` makes the error that names the key's line.
"""

from __future__ import annotations

from collections.abc import Callable

from common.config import JobConfig
from common.errors import ConfigError

AT_LEAST: dict[str, float] = {
    "algorithm.loss_constant": 0,
    "algorithm.overlong_penalty": 0,
    "algorithm.kl_coefficient": 0,
    "algorithm.updates": 1,
    "algorithm.discount": 0,
    "algorithm.gae_lambda": 0,
    "algorithm.value_clip": 0,
    "algorithm.value_coefficient": 0,
}
SHARES = ("discount", "gae_lambda")  # at most 1
REWARDLESS = ("sft", "distill")  # where a divergence in the reward would change nothing
Fail = Callable[..., ConfigError]


def check(config: JobConfig, fail: Fail) -> None:
    """Numbers that are out of range or do not go together."""
    chosen = config.algorithm
    for name in SHARES:
        if getattr(chosen, name) > 1:
            raise fail(f"algorithm.{name}", f"algorithm.{name} must be at most 1")
    if chosen.updates > chosen.groups_per_step:
        raise fail(
            "algorithm.updates", "algorithm.updates exceeds the groups of a step that they share"
        )
    if chosen.overlong_buffer > config.rollout.max_tokens:
        raise fail("algorithm.overlong_buffer", "algorithm.overlong_buffer exceeds max_tokens")
    if 0 <= chosen.correction_high < chosen.correction_low:
        raise fail("algorithm.correction_high", "algorithm.correction_high is below the lowest")
    if chosen.name in REWARDLESS and chosen.kl_coefficient and chosen.kl_in == "reward":
        raise fail(
            "algorithm.kl_in", f"{chosen.name} has no reward to take a divergence off", "Use 'loss'"
        )
    scored = chosen.kl_coefficient > 0 or chosen.name == "distill"
    if scored and config.rollout.temperature != 1:
        raise fail(
            "rollout.temperature",
            "rollout.temperature must be 1, at which references and teachers score",
            "Set it to 1",
        )
