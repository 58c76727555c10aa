"""Checks that tokens fit the model: positions, the tokenizer's ids, the tokens that end a turn."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import INITIAL, RolloutConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.tokens.tokenizer import Tokenizer, absent_ids
from meshrl.job.loaded import JobFile
from meshrl.job.model_files import loaded, shape_at

MODELS = 8  # of one job, which several checks ask for


@lru_cache(MODELS)
def model_at(job: JobFile, path: str) -> ModelConfig:
    """The shape of the model in a directory; without one, of the model that begins from scratch."""
    return shape_at(path, job.config.model.config)


def known_model(job: JobFile) -> ModelConfig:
    """Return the job's model without the ids that its tokenizer lacks."""
    own = model_at(job, job.config.model.path)
    ids = tokenizer_of(job).vocabulary.values()
    return replace(own, absent_ids=absent_ids(ids, own.vocab_size))


@lru_cache(MODELS)
def tokenizer_of(job: JobFile) -> Tokenizer:
    """The job's tokenizer; ConfigError when the file is none."""
    return loaded(job, job.config.model.tokenizer_file, "model.tokenizer")


def positions(job: JobFile) -> None:
    """No sequence is longer than the model that reads it has positions."""
    config, longest = job.config, job.config.rollout.max_tokens
    own = model_at(job, config.model.path).max_positions
    _fits(job, "rollout.max_tokens", longest, own, config.model.path)
    for role, frozen in config.models.declared.items():
        has = own if frozen.path == INITIAL else model_at(job, frozen.path).max_positions
        path = config.model.path if frozen.path == INITIAL else frozen.path
        if frozen.max_tokens:
            _fits(job, f"models.{role}.max_tokens", frozen.max_tokens, has, path)
        elif longest > has:
            raise job.fail(
                f"models.{role}",
                f"models.{role} is asked about sequences of up to rollout.max_tokens = {longest} "
                f"tokens, and has {has} positions{_in(path)}",
                f"Lower rollout.max_tokens to {has} or less",
            )


def _fits(job: JobFile, key: str, longest: int, has: int, path: str) -> None:
    if longest <= has:
        return
    default = key == "rollout.max_tokens" and longest == RolloutConfig().max_tokens
    raise job.fail(
        key,
        f"{key} = {longest}{' (the default)' if default else ''} exceeds the model's "
        f"{has} positions{_in(path)}",
        f"Set {key} to {has} or less"
        + ("" if path else ", or raise max_position_embeddings in [model.config]"),
    )


def _in(path: str) -> str:
    return f" (max_position_embeddings of {path}/config.json)" if path else ""


def vocabulary(job: JobFile) -> None:
    """Every id of the tokenizer, those of added tokens too, has a row of the embedding, in each
    model that scores the job's tokens.
    """
    config = job.config
    rows = {"model": model_at(job, config.model.path).vocab_size}
    for role, frozen in config.models.declared.items():
        if role != "reward" and frozen.path != INITIAL:
            rows[f"models.{role}"] = model_at(job, frozen.path).vocab_size
    token, last = max(tokenizer_of(job).vocabulary.items(), key=lambda entry: entry[1])
    for which, has in rows.items():
        if last < has:
            continue
        scratch = which == "model" and not config.model.path
        raise job.fail(
            "model.tokenizer" if which == "model" else f"{which}.path",
            f"the tokenizer has ids up to {last} ({token!r}), and "
            f"{'the model' if which == 'model' else which} {has} rows of its embedding "
            "(vocab_size)",
            "Take the tokenizer that belongs to the model"
            + (f", or set vocab_size to {last + 1} or more" if scratch else ""),
        )


def stop(job: JobFile) -> None:
    """What ends a turn can be sampled."""
    rollout, tokenizer = job.config.rollout, tokenizer_of(job)
    unknown = [text for text in rollout.stop if tokenizer.token_to_id(text) is None]
    if unknown:
        raise job.fail(
            "rollout.stop",
            f"rollout.stop: {unknown[0]!r} is no token of the tokenizer",
            "Name a token as the tokenizer.json has it; a text of several tokens goes into "
            "rollout.stop_text",
        )
    for text in rollout.stop_text:
        try:
            tokenizer.encode(text)
        except ConfigError as error:
            wrong = f"rollout.stop_text: the model can never write {text!r}: {error.message}"
            fix = "Keep to characters of the tokenizer's vocabulary"
            raise job.fail("rollout.stop_text", wrong, fix) from error
