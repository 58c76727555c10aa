"""Checks that the weights of every model of the job are whole, from their files' headers."""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError
from common.job.config import INITIAL
from common.model import checkpoint_files
from meshrl.job.jobfile import JobFile
from meshrl.preflight.tokens import model_at


def whole(job: JobFile) -> None:
    """Each tensor lies there, in its shape and a floating-point type; no file is cut short."""
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
        except ConfigError as error:
            raise job.fail(key, f"{key}: {error.message} ({error.where})", error.fix) from error
