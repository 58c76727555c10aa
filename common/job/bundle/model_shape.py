"""Shape of a job's model, before there are any weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.model_directory import load_config
from meshrl.common.model.tokens.tokenizer import with_tokenizer


def load_model_config(data: JobData) -> ModelConfig:
    """Return the shape of the job's trained model, from its bundle or its job file.

    Token ids that the job's tokenizer lacks are not included.
    """
    if (origin := data.initial_model_dir) is not None:
        shape = _load_bundle_config(origin)
    else:
        shape = ModelConfig.from_hf(data.config.model.config)
    return with_tokenizer(shape, data.tokenizer_file)


@cache
def _load_bundle_config(directory: Path) -> ModelConfig:
    """Return the shape in a directory, read once: a bundle never changes."""
    return load_config(directory)
