"""Shapes and tokenizers of the models that a job names, as their files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import JobConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.checkpoint import load_config
from meshrl.common.model.files.checkpoint_files import refuse_pointer
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.job.loaded import PLACED, JobFile


def loaded(job: JobFile, place: Path, key: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json or its directory, which `key` names."""
    with job.naming(key, PLACED):
        if (file := place / "tokenizer.json" if place.is_dir() else place).is_file():
            refuse_pointer(file)
        return Tokenizer.load(place)


def shape(config: JobConfig) -> ModelConfig:
    """The shape of the model that a job trains; ConfigError as of `shape_at`."""
    return shape_at(config.model.path, config.model.config)


def shape_at(path: str, described: dict[str, Any]) -> ModelConfig:
    """What the files of a directory say, or `described` without one; ConfigError when that is no
    decoder of ours.
    """
    try:
        if path:
            return load_config(path)
    except OSError as error:
        raise ConfigError(
            f"the model cannot be read: {error.strerror}",
            where=str(error.filename),
            fix="see that it is a file that you may read",
        ) from error
    try:
        return ModelConfig.from_hf(described)
    except (OSError, ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"the model's description cannot be read: {type(error).__name__}: {error}",
            where="model.config",
        ) from error


def size(config: JobConfig) -> int:
    return shape(config).parameters
