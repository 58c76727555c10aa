"""Checks the keys of a job file for frozen models, judges, supervised answers and evaluation.

`fail(key, message, fix)` makes the error that names the key's line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.job.config import INITIAL, JobConfig, JudgeConfig
from common.job.evaluation_plan import HELD_OUT, figures
from common.model.checkpoint_files import refuse_pointer
from common.model.config import ModelConfig
from common.model.formats.checkpoint import load_config
from common.model.messages import message_of
from common.model.tokenizer import Tokenizer
from common.urls import Url
from meshrl.job import rows
from meshrl.job.checks.file import algorithm

Fail = Callable[..., ConfigError]


def check(config: JobConfig, document: dict[str, Any], fail: Fail) -> None:
    """All of it but the rows."""
    models(config, document, fail)
    judge_of(config, fail)
    evaluation_of(config, fail)


def supervised(config: JobConfig, document: dict[str, Any], fail: Fail) -> JobConfig:
    """A job of given answers, whose groups are of one trajectory."""
    if not config.supervised:
        if config.algorithm.group_size < 2 and config.algorithm.name not in algorithm.REWARDLESS:
            raise fail(
                "algorithm.group_size",
                "algorithm.group_size must be at least 2: an advantage compares",
            )
        return config
    if document.get("algorithm", {}).get("group_size", 1) != 1:
        raise fail("algorithm.group_size", "algorithm.group_size: of sft it is 1")
    if config.environment.verifiers:
        raise fail("environment.verifiers", "sft learns rows, which tasks of verifiers are not")
    return replace(config, algorithm=replace(config.algorithm, group_size=1))


def models(config: JobConfig, document: dict[str, Any], fail: Fail) -> None:
    declared = config.models.declared
    if config.algorithm.kl_coefficient and "reference" not in declared:
        raise fail(
            "algorithm.kl_coefficient",
            "algorithm.kl_coefficient compares with models.reference, which the job has not",
            f"Set models.reference.path, to {INITIAL!r} or a directory",
        )
    if config.algorithm.name == "distill" and "teacher" not in declared:
        raise fail("algorithm.name", "distill learns from models.teacher, which the job has not")
    for role, table in document.get("models", {}).items():
        if "path" not in table:
            raise fail(
                f"models.{role}",
                f"models.{role} has no path",
                "Name a Hugging Face directory"
                + (f", or {INITIAL!r}" if role == "reference" else ""),
            )
    if {"reference", "teacher"} & set(declared) and config.rollout.temperature != 1:
        raise fail(
            "rollout.temperature",
            "reference and teacher are compared with what the model samples at temperature 1, not "
            f"{config.rollout.temperature:g}",
        )
    tokenizer = Path(config.model.tokenizer or Path(config.model.path) / "tokenizer.json")
    for role, model in declared.items():
        key, place = f"models.{role}.path", Path(model.path)
        if model.path == INITIAL:
            if role != "reference":
                raise fail(key, f"{key} = {INITIAL!r} is for the reference alone")
            continue
        if not (place / "config.json").is_file():
            raise fail(key, f"{place} holds no config.json")
        if role == "reward" and not (place / "tokenizer.json").is_file():
            raise fail(key, f"{place} holds no tokenizer.json")
        if role != "reward" and (place / "tokenizer.json").is_file() and tokenizer.is_file():
            own = loaded(tokenizer, "model.tokenizer", fail).vocabulary
            theirs = loaded(place, key, fail).vocabulary
            if not own.items() <= theirs.items():
                raise fail(key, f"{place} has another tokenizer than the model")


def loaded(place: Path, key: str, fail: Fail) -> Tokenizer:
    """The tokenizer of a tokenizer.json or its directory, which `key` names."""
    try:
        if (file := place / "tokenizer.json" if place.is_dir() else place).is_file():
            refuse_pointer(file)
        return Tokenizer.load(place)
    except ConfigError as error:
        raise fail(key, f"{key}: {error.message} ({error.where})", error.fix) from error


def shapes(config: JobConfig, fail: Fail) -> None:
    """Every model is described as one that the decoder implements."""
    own = config.model.path
    paths = {"model.path" if own else "model.config": own}
    paths |= {f"models.{role}.path": m.path for role, m in config.models.declared.items()}
    for key, path in paths.items():
        if path == INITIAL:
            continue
        try:
            shape(path, config.model.config)
        except ConfigError as error:
            where = f" ({error.where})" if error.where else ""
            raise fail(key, f"{key}: {error.message}{where}", error.fix) from error


def shape(path: str, described: dict[str, Any]) -> ModelConfig:
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
    """How many parameters the job's model has."""
    return shape(config.model.path, config.model.config).parameters


def judge_of(config: JobConfig, fail: Fail) -> None:
    judge = config.reward.judge
    if not judge.use:
        if config.models.reward.path:
            raise fail(
                "models.reward", "nobody asks models.reward", 'Set reward.judge.use = "model"'
            )
        return
    if config.reward.declared:
        raise fail("reward.judge.use", "reward.use and reward.judge.use exclude each other")
    if "{answer}" not in judge.template:
        raise fail("reward.judge.template", "reward.judge.template has no {answer}")
    if judge.use == "model":
        if not config.models.reward.path:
            raise fail("reward.judge.use", "there is no [models.reward] to ask")
        if judge.yes == judge.no:
            raise fail("reward.judge.yes", "reward.judge.yes and reward.judge.no are one")
    elif not re.match(r"https?://[^/\s]+", judge.use):
        raise fail(
            "reward.judge.use",
            f"reward.judge.use = {Url.of(judge.use).place!r} is neither 'model' nor a URL",
        )
    elif Url.of(judge.use).place.rstrip("/") != judge.use.rstrip("/"):
        raise fail(
            "reward.judge.use",
            "a URL with a user, a password or a query in it would stand in the run's files",
            "Put the key into an environment variable and name that in reward.judge.key",
        )
    elif not judge.model:
        raise fail("reward.judge.use", "reward.judge.model is missing")
    if judge.key and judge.key not in os.environ:
        raise fail("reward.judge.key", f"the environment has no variable {judge.key}")


def evaluation_of(config: JobConfig, fail: Fail) -> None:
    evaluation = config.evaluation
    names = [HELD_OUT, *(d.name for d in evaluation.datasets)]
    for i, d in enumerate(evaluation.datasets):
        table = f"evaluation.datasets[{i}]"
        if names.count(d.name) > 1:
            raise fail(f"{table}.name", f"{table}.name: {d.name!r} is taken", "Choose another")
        if any(k > d.samples for k in d.pass_at):
            key = f"{table}.pass_at"
            raise fail(key, f"{key} = {d.pass_at} must lie in 1 to samples = {d.samples}")
    offered = figures(evaluation, bool(config.dataset.held_out or config.environment.verifiers))
    if evaluation.best and evaluation.best not in offered:
        raise fail(
            "evaluation.best",
            f"evaluation.best = {evaluation.best!r} is no figure of this job",
            f"there are {', '.join(offered) or 'none: name dataset.held_out'}",
        )


def answered(config: JobConfig, row: rows.Row, fail: Fail) -> None:
    key = config.dataset.response
    answer = row.value.get(key)
    if isinstance(answer, dict) and not config.environment.chat:
        raise fail(
            "dataset.response",
            f"{row.place}: {key!r} is a message, and the job has no chat format",
            'Set environment.chat, such as "auto", or write the answer as a text',
        )
    if not isinstance(answer, dict | str) or not answer:
        raise fail(
            "dataset.response",
            f"{row.place}: the row has no text {key!r} to learn",
            "Set dataset.response to the row's key that holds the answer",
        )
    try:
        if isinstance(answer, dict):
            message_of({"role": "assistant"} | answer, "the answer", ("assistant",))
    except ValueError as error:
        raise fail(
            "dataset.response",
            f"{row.place}: {key!r} is no message of the assistant: {error}",
            "Write it as a text, or as {'role': 'assistant', 'content': text}",
        ) from error


def filled(judge: JudgeConfig, base: Path, fail: Fail) -> str:
    """The judge's template: the text itself, or that of the file beside the job that it names."""
    template = judge.template
    named = "\n" not in template and len(template) < 256 and (base / template).is_file()
    if not (template and named):
        return template
    try:
        return (base / template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wrong = f"reward.judge.template: {base / template} is no UTF-8 text: {error}"
        raise fail("reward.judge.template", wrong) from error
