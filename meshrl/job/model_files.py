"""Shapes and tokenizers of the models that a job names, as their files have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import INITIAL, EnvironmentConfig, JobConfig
from meshrl.common.job.memory.plan import JobModels
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.chat.chat_format import ChatFormat
from meshrl.common.model.files import weight_files
from meshrl.common.model.files.model_directory import load_config
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.job.job_file import MESSAGE_WITH_LOCATION, JobFile

MAX_READ_BYTES = 1 << 28  # weights up to this size are read; larger ones are checked when loaded


def load_tokenizer(job: JobFile, path: Path, key: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json or its directory, which `key` names."""
    with job.locate_errors(key, MESSAGE_WITH_LOCATION):
        if (file := path / "tokenizer.json" if path.is_dir() else path).is_file():
            weight_files.reject_lfs_pointer(file)
        return Tokenizer.load(path)


def load_chat(
    environment: EnvironmentConfig, tokenizer: Tokenizer, stop_tokens: Sequence[str]
) -> ChatFormat:
    """Return the chat format that a job names; ConfigError as in `ChatFormat.load`."""
    return ChatFormat.load(
        environment.chat,
        environment.chat_options,
        tokenizer,
        history=environment.chat_history,
        tool_call_parser=environment.tool_call_parser,
        stop_tokens=stop_tokens,
        date=environment.chat_date,
        special_tokens=environment.special_tokens,
    )


def load_shape(config: JobConfig) -> ModelConfig:
    """Return the shape of the model that a job trains; ConfigError as in `load_shape_from`."""
    return load_shape_from(config.model.path, config.model.config)


def load_shape_from(path: str, description: dict[str, Any]) -> ModelConfig:
    """Return the shape in a directory's files, or that of `description` without a directory.

    Raises ConfigError when that is no supported decoder.
    """
    try:
        if path:
            return load_config(path)
    except OSError as error:
        raise ConfigError(
            f"the model cannot be read: {error.strerror}",
            where=str(error.filename),
            fix="Check that the path is a file with read permission",
        ) from error
    try:
        return ModelConfig.from_hf(description)
    except (OSError, ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"the model's description cannot be read: {type(error).__name__}: {error}",
            where="model.config",
        ) from error


def check_weights(path: str, shape: ModelConfig) -> None:
    """Check that each tensor exists, with its shape and a floating-point type, in complete files.

    No weight of a small model may be NaN or infinite.
    """
    directory = Path(path)
    weight_files.check_weights(directory, shape)
    files = weight_files.list_weight_files(directory)
    if sum(file.stat().st_size for file in files) <= MAX_READ_BYTES:
        weight_files.check_finite(directory)


def count_parameters(config: JobConfig) -> int:
    return load_shape(config).num_parameters


def load_models(config: JobConfig) -> JobModels:
    """Return the shapes of all models of a job; ConfigError as in `load_shape_from`."""
    trained = load_shape(config)
    frozen = {
        role: trained if model.path == INITIAL else load_shape_from(model.path, {})
        for role, model in config.models.models_by_role.items()
    }
    return JobModels(trained, frozen)


def describe_models(config: JobConfig) -> dict[str, Any]:
    """Return the keys of config.json of each model by role, for the planning of memory."""
    models = load_models(config)
    return {
        role: shape.to_hf() for role, shape in {"trained": models.trained, **models.frozen}.items()
    }
