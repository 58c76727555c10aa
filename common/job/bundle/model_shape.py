"""Reads the shape of a job's model, before there are any weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.checkpoint import load_config
from meshrl.common.model.tokens.tokenizer import with_tokenizer


def model_config(data: JobData) -> ModelConfig:
    """The shape of the model that the job trains, from its bundle or from its job file, without
    the ids that the job's tokenizer lacks."""
    if (origin := data.origin) is not None:
        shape = _of_bundle(origin)
    else:
        shape = ModelConfig.from_hf(data.config.model.config)
    return with_tokenizer(shape, data.tokenizer)


@cache
def _of_bundle(directory: Path) -> ModelConfig:
    """Read once: a bundle never changes."""
    return load_config(directory)
