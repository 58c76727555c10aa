"""Checks the keys of a job file for the degrees of tensor parallelism that engines may have.

`fail(key, message, fix)` makes the error that names the key's line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.errors import ConfigError
from common.job.config import JobConfig
from meshrl.job.checks.file.models import shape

Fail = Callable[..., ConfigError]

KEY = "rollout.tensor_parallel"
OF_SGLANG = ("--tp", "--tp-size", "--tensor-parallel-size")  # its flags that say the same


def check(config: JobConfig, fail: Fail) -> None:
    """Degrees are powers of two that something here computes with, or imitates."""
    rollout = config.rollout
    degrees = rollout.tensor_parallel
    if not degrees:
        raise fail(KEY, f"{KEY} is empty", "Set [1], or the degrees that engines may have")
    if wrong := [degree for degree in degrees if degree & (degree - 1)]:
        raise fail(KEY, f"{KEY} has {wrong[0]}, which is no power of two")
    if max(degrees) == 1:
        return
    if rollout.engine != "sglang" and not rollout.pace:
        raise fail(
            KEY,
            f"{KEY} has {max(degrees)}, and the built-in engine computes on one worker",
            'Set rollout.engine = "sglang", or rollout.pace to imitate an accelerator',
        )
    if given := _flag(rollout.sglang_options):
        raise fail(
            "rollout.sglang_options",
            f"rollout.sglang_options has {given}, which {KEY} says already",
            "Leave it out",
        )


def divides(config: JobConfig, fail: Fail) -> None:
    """Each worker of an engine has as many heads as the others. A paced engine stands for another
    model than the one that it computes.
    """
    if config.rollout.pace or max(config.rollout.tensor_parallel) == 1:
        return
    model = shape(config.model.path, config.model.config)
    for degree in config.rollout.tensor_parallel:
        shared = model.kv_heads % degree and degree % model.kv_heads
        if model.heads % degree or shared:
            raise fail(
                KEY,
                f"{KEY} has {degree}, and the model's {model.heads} heads with {model.kv_heads} of "
                "keys and values cannot be divided among so many workers",
                "Leave that degree out",
            )


def _flag(options: Sequence[str]) -> str:
    return next((o for o in options if o.partition("=")[0] in OF_SGLANG), "")
