"""Checks the keys of a job file for the degrees of tensor parallelism that engines may have."""

from __future__ import annotations

from meshrl.job.loaded import JobFile
from meshrl.job.model_files import shape

KEY = "rollout.tensor_parallel"
OF_SGLANG = ("--tp", "--tp-size", "--tensor-parallel-size")  # its flags that say the same


def degrees(job: JobFile) -> None:
    """Degrees are powers of two that something here computes with, or imitates."""
    rollout = job.config.rollout
    given = rollout.tensor_parallel
    if not given:
        raise job.fail(KEY, f"{KEY} is empty", "Set [1], or the degrees that engines may have")
    if odd := [degree for degree in given if degree & (degree - 1)]:
        raise job.fail(KEY, f"{KEY} has {odd[0]}, which is no power of two")
    if max(given) == 1:
        return
    if rollout.engine != "sglang" and not rollout.pace:
        wrong = f"{KEY} has {max(given)}, and the built-in engine computes on one worker"
        fix = 'Set rollout.engine = "sglang", or rollout.pace to imitate an accelerator'
        raise job.fail(KEY, wrong, fix)
    if flag := next((o for o in rollout.sglang_options if o.partition("=")[0] in OF_SGLANG), ""):
        wrong = f"rollout.sglang_options has {flag}, which {KEY} says already"
        raise job.fail("rollout.sglang_options", wrong, "Leave it out")


def divides(job: JobFile) -> None:
    """Each worker of an engine has as many heads as the others. A paced engine stands for another
    model than the one that it computes.
    """
    if job.config.rollout.pace or max(job.config.rollout.tensor_parallel) == 1:
        return
    model = shape(job.config)
    for degree in job.config.rollout.tensor_parallel:
        shared = model.kv_heads % degree and degree % model.kv_heads
        if model.heads % degree or shared:
            raise job.fail(
                KEY,
                f"{KEY} has {degree}, and the model's {model.heads} heads with {model.kv_heads} of "
                "keys and values cannot be divided among so many workers",
                "Leave that degree out",
            )
