"""Checks that tokens fit the model: positions, the tokenizer's ids, the tokens that end a turn."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import INITIAL, RolloutConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.tokens.logit_bias import resolve_logit_bias
from meshrl.common.model.tokens.tokenizer import Tokenizer, find_absent_ids
from meshrl.job.job_file import JobFile
from meshrl.job.model_files import load_shape_from, load_tokenizer

CACHED_MODELS = 8  # models of one job, which several checks load


@lru_cache(CACHED_MODELS)
def load_model_shape(job: JobFile, path: str) -> ModelConfig:
    """Return the shape of the model in a directory; without one, of the model from scratch."""
    return load_shape_from(path, job.config.model.config)


def load_model_without_absent_ids(job: JobFile) -> ModelConfig:
    """Return the job's model without the ids that its tokenizer lacks."""
    own = load_model_shape(job, job.config.model.path)
    ids = load_job_tokenizer(job).vocabulary.values()
    return replace(own, absent_ids=find_absent_ids(ids, own.vocab_size))


@lru_cache(CACHED_MODELS)
def load_job_tokenizer(job: JobFile) -> Tokenizer:
    """Return the job's tokenizer; raise ConfigError when the file is none."""
    return load_tokenizer(job, job.config.model.tokenizer_file, "model.tokenizer")


def check_positions(job: JobFile) -> None:
    """Check that no sequence is longer than the positions of each model that reads it."""
    config, longest = job.config, job.config.rollout.max_tokens
    own = load_model_shape(job, config.model.path).max_positions
    _check_length(job, "rollout.max_tokens", longest, own, config.model.path)
    for role, frozen in config.models.models_by_role.items():
        max_positions = (
            own if frozen.path == INITIAL else load_model_shape(job, frozen.path).max_positions
        )
        path = config.model.path if frozen.path == INITIAL else frozen.path
        if frozen.max_tokens:
            _check_length(job, f"models.{role}.max_tokens", frozen.max_tokens, max_positions, path)
        elif longest > max_positions:
            raise job.make_error(
                f"models.{role}",
                f"models.{role} scores sequences of up to rollout.max_tokens = {longest} "
                f"tokens, but has {max_positions} positions{_describe_config_file(path)}",
                f"Lower rollout.max_tokens to {max_positions} or less",
            )


def _check_length(job: JobFile, key: str, longest: int, positions: int, path: str) -> None:
    if longest <= positions:
        return
    default = key == "rollout.max_tokens" and longest == RolloutConfig().max_tokens
    raise job.make_error(
        key,
        f"{key} = {longest}{' (the default)' if default else ''} exceeds the model's "
        f"{positions} positions{_describe_config_file(path)}",
        f"Set {key} to {positions} or less"
        + ("" if path else ", or raise max_position_embeddings in [model.config]"),
    )


def _describe_config_file(path: str) -> str:
    return f" (max_position_embeddings of {path}/config.json)" if path else ""


def check_vocabulary(job: JobFile) -> None:
    """Check that every id of the tokenizer has a row in each scoring model's embedding.

    The ids include those of added tokens.
    """
    config = job.config
    rows = {"model": load_model_shape(job, config.model.path).vocab_size}
    for role, frozen in config.models.models_by_role.items():
        if role != "reward" and frozen.path != INITIAL:
            rows[f"models.{role}"] = load_model_shape(job, frozen.path).vocab_size
    token, last = max(load_job_tokenizer(job).vocabulary.items(), key=lambda entry: entry[1])
    for model_key, row_count in rows.items():
        if last < row_count:
            continue
        scratch = model_key == "model" and not config.model.path
        raise job.make_error(
            "model.tokenizer" if model_key == "model" else f"{model_key}.path",
            f"the tokenizer has ids up to {last} ({token!r}), but "
            f"{'the model' if model_key == 'model' else model_key} has an embedding of "
            f"{row_count} rows (vocab_size)",
            "Use the model's own tokenizer"
            + (f", or set vocab_size to {last + 1} or more" if scratch else ""),
        )


def check_stop(job: JobFile) -> None:
    """Check that the tokens that end a turn can be sampled, and that biased ones exist."""
    rollout, tokenizer = job.config.rollout, load_job_tokenizer(job)
    with job.locate_errors("rollout.logit_bias"):
        resolve_logit_bias(tokenizer, rollout.logit_bias)
    unknown = [text for text in rollout.stop if tokenizer.token_to_id(text) is None]
    if unknown:
        raise job.make_error(
            "rollout.stop",
            f"rollout.stop: {unknown[0]!r} is not a token of the tokenizer",
            "Use a token of tokenizer.json, or put a text of several tokens into rollout.stop_text",
        )
    for text in rollout.stop_text:
        try:
            tokenizer.encode(text)
        except ConfigError as error:
            wrong = f"rollout.stop_text: the model cannot generate {text!r}: {error.message}"
            fix = "Use only characters of the tokenizer's vocabulary"
            raise job.make_error("rollout.stop_text", wrong, fix) from error
