"""Checks that the weights of every model of the job are whole, from their files' headers, and of
small ones that they are numbers; and that the job's versions have room in their quota.
"""

from __future__ import annotations

from pathlib import Path

from meshrl.common.model.files import checkpoint_files
from meshrl.job.checks.machine.tokens import model_at
from meshrl.job.loaded import PLACED, JobFile
from meshrl.job.model_files import size

GIB = 1 << 30
READ_BYTES = 1 << 28  # weights up to this size are read; larger ones are looked at when loaded


def whole(job: JobFile) -> None:
    """Each tensor lies there, in its shape and a floating-point type; no file is cut short, and no
    weight of a small model is NaN or infinite.
    """
    for file in job.models:
        path = Path(file.path)
        with job.naming(file.key, PLACED):
            checkpoint_files.check(path, model_at(job, file.path))
            if sum(f.stat().st_size for f in checkpoint_files.files(path)) <= READ_BYTES:
                checkpoint_files.check_finite(path)


def quota(job: JobFile) -> None:
    """The versions that the run has at a time have room in `weights.quota_gb`: those of the kept
    checkpoints, the current one, and the next.
    """
    config, allowed = job.config, job.config.weights.quota_gb
    if not allowed or config.lora.rank or not config.budget.steps:
        return
    steps, every = config.budget.steps, config.training.checkpoint_every
    kept = min(config.training.keep_checkpoints, 1 + -(-steps // every))
    versions = min(steps, kept + 2 if every > 1 else kept + 1)
    width = 2 if config.rollout.dtype == "bfloat16" else 4
    needed = versions * size(config) * width / GIB
    if needed > allowed:
        raise job.fail(
            "weights.quota_gb",
            f"weights.quota_gb = {allowed:g} GiB are too few for {versions} versions of "
            f"{size(config) * width / GIB:.3g} GiB, which the run has at a time: its kept "
            "checkpoints, the current one and the next",
            f"Take {needed:.3g} or more, or lower training.keep_checkpoints",
        )
