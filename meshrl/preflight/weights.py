"""Checks that the weights of every model of the job are whole, from their files' headers, and of
small ones that they are numbers.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError
from common.job.config import INITIAL
from common.model import checkpoint_files
from meshrl.job.jobfile import JobFile
from meshrl.preflight.tokens import model_at

READ_BYTES = 1 << 28  # weights up to this size are read; larger ones are looked at when loaded


def whole(job: JobFile) -> None:
    """Each tensor lies there, in its shape and a floating-point type; no file is cut short, and no
    weight of a small model is NaN or infinite.
    """
    config = job.config
    paths = {"model.path": config.model.path} if config.model.path else {}
    paths |= {
        f"models.{role}.path": model.path
        for role, model in config.models.declared.items()
        if model.path != INITIAL
    }
    for key, path in paths.items():
        try:
            checkpoint_files.check(Path(path), model_at(job, path))
            if sum(f.stat().st_size for f in checkpoint_files.files(Path(path))) <= READ_BYTES:
                checkpoint_files.check_finite(Path(path))
        except ConfigError as error:
            raise job.fail(key, f"{key}: {error.message} ({error.where})", error.fix) from error
