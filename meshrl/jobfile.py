"""Job files: from TOML and `--set` to a checked JobConfig, every error with line and fix."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from common import corrections
from common.config import INITIAL, JobConfig
from common.errors import ConfigError
from common.model.chat import Chat, format_of
from common.model.tokenizer import Tokenizer
from common.pace import profile
from meshrl import jobalgorithm, jobextras, jobmodels, jobsandbox, references, rows
from meshrl.toml_lines import key_lines, line_of

REFERENCES = ("environment.use", "warm_start.demonstrations")
CHOICES = {
    "mesh.device": ("cpu", "cuda"),
    "training.dtype": ("float32", "bfloat16"),
    "rollout.kv_on_update": ("keep", "recompute"),
    "rollout.engine": ("torch", "sglang"),
    "rollout.sglang_weights": ("auto", "disk", "tensors", "distributed"),
    "rollout.path": ("auto", "native", "eager", "graphs"),
    "rollout.dtype": ("float32", "bfloat16"),
    **{f"models.{role}.engine": ("torch",) for role in jobmodels.FROZEN},
    **{
        f"models.{role}.engine_path": ("auto", "native", "eager", "graphs")
        for role in jobmodels.FROZEN
    },
    **{f"models.{role}.dtype": ("float32", "bfloat16") for role in jobmodels.FROZEN},
    "algorithm.name": jobmodels.ALGORITHMS,
    "algorithm.kl": ("k1", "k2", "k3"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.aggregation": ("", "tokens", "sequences", "constant"),
    "algorithm.correction": corrections.NAMES,
    "algorithm.correction_level": ("token", "sequence"),
}
AT_LEAST: dict[str, float] = {
    "mesh.workers": 2,  # one trains, one rolls out
    "dataset.tasks": 0,
    "dataset.held_out_tasks": 0,
    "environment.processes": 1,
    "rollout.shards": 1,
    "rollout.slots": 1,
    "rollout.max_tokens": 2,
    "rollout.max_turns": 1,
    "rollout.kv_tokens": 0,
    "rollout.top_k": 0,
    "rollout.min_p": 0.0,
    "algorithm.group_size": 1,
    "algorithm.groups_per_step": 1,
    "algorithm.max_staleness": 0,
    "training.bin_tokens": 1,
    "training.checkpoint_every": 1,
    "training.keep_checkpoints": 1,
    "training.ranks": 1,
    **{f"models.{role}.max_tokens": 0 for role in jobmodels.FROZEN},
    "reward.judge.max_tokens": 1,
    "reward.judge.in_flight": 1,
    "lora.rank": 0,
    **jobalgorithm.AT_LEAST,
    "evaluation.every": 0,
    "budget.steps": 1,
    "planner.min_rollout": 1,
    "planner.training": 1,
    "planner.imbalance": 1.0,
}


def load(path: Path, overrides: list[str]) -> tuple[JobConfig, Path]:
    """The job that a file describes, with `KEY=VALUE` overrides, and the directory it lies in.

    Paths in the result are absolute. ConfigError names the line, or the override, that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the job file {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    places = {key: f"{path}, line {n}" for key, n in key_lines(text).items()}
    for override in overrides:
        places[apply_override(document, override)] = f"--set {override}"
    base = path.resolve().parent
    return _Checker(path, places).check(document, base), base


def apply_override(document: dict[str, Any], override: str) -> str:
    """Set one `KEY=VALUE` in the document; returns KEY. VALUE is TOML, or else a bare string."""
    key, equals, raw = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set {override}: write KEY=VALUE, as in --set budget.steps=12")
    try:
        value: Any = tomllib.loads(f"x = {raw}")["x"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    if kinds().get(key) is str and not isinstance(value, str):
        value = raw.strip()
    *tables, last = key.split(".")
    place = document
    for table in tables:
        place = place.setdefault(table, {})
        if not isinstance(place, dict):
            raise ConfigError(f"--set {override}: {table} is not a table")
    place[last] = value
    return key


def kinds(cls: type[Any] = JobConfig, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> type, for every key of a job file; tables map to their dataclass."""
    found: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for field in fields(cls):
        kind = hints[field.name]
        found[prefix + field.name] = kind
        if is_dataclass(kind) and isinstance(kind, type):
            found |= kinds(kind, f"{prefix}{field.name}.")
    return found


def nearest(key: str) -> str:
    """The valid key that a mistyped one most likely means; empty when nothing is close."""
    known = list(kinds())
    if key in known:
        return key
    table, _, last = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == table}
    elsewhere = {k.rpartition(".")[2]: k for k in reversed(known)}
    for names, cutoff in ((siblings, 0.75), (elsewhere, 0.85)):
        if matches := difflib.get_close_matches(last, names, n=1, cutoff=cutoff):
            return names[matches[0]]
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.6)), "")


class _Checker:
    """One pass over one job file; holds where each key was written, for the messages."""

    def __init__(self, path: Path, places: dict[str, str]) -> None:
        self.path = path
        self.places = places

    def check(self, document: dict[str, Any], base: Path) -> JobConfig:
        self._keys_and_types(document)
        config = self._absolute(self._built(document), base)
        config = jobmodels.supervised(config, document, self.fail)
        self._values(config)
        jobmodels.check(config, document, self.fail)
        jobalgorithm.check(config, self.fail)
        self._files(config)
        jobmodels.shapes(config, self.fail)
        jobextras.check(config, self.fail)
        jobsandbox.check(config, self.fail)
        self._verifiers(config)
        self._references(config, base)
        return self._chat(config)

    def _built(self, document: dict[str, Any]) -> JobConfig:
        try:
            return JobConfig.from_document(document)
        except ConfigError as error:  # in a table of a list, which was not looked into before
            table = re.search(r"[\w.]+(?=\[)", error.message)
            raise self.fail(table.group() if table else "", error.message, error.fix) from error

    def fail(self, key: str, message: str, fix: str = "") -> ConfigError:
        lines = {k: i for i, k in enumerate(self.places, 1)}
        index = line_of(lines, key)
        place = list(self.places.values())[index - 1] if index else str(self.path)
        return ConfigError(f"{place}: {message}", fix=fix)

    def _keys_and_types(self, document: dict[str, Any]) -> None:
        known = kinds()
        for key, value in _leaves(document, known):
            kind = known.get(key)
            if kind is None:
                guess = nearest(key)
                raise self.fail(
                    key,
                    f"unknown key {key}",
                    f"Did you mean {guess}?" if guess else "`meshrl run --dry-run` prints all keys",
                )
            if not _fits(kind, value):
                raise self.fail(key, f"{key} must be {_name(kind)}, not {value!r}")

    def _absolute(self, config: JobConfig, base: Path) -> JobConfig:
        def place(text: str) -> str:
            return str((base / Path(text).expanduser()).resolve()) if text else ""

        model, dataset, environment = config.model, config.dataset, config.environment
        judge, evaluation = config.reward.judge, config.evaluation
        frozen = {
            role: replace(m, path=m.path if m.path == INITIAL else place(m.path))
            for role, m in config.models.declared.items()
        }
        held = [replace(d, path=place(d.path)) for d in evaluation.datasets]
        python = environment.python and os.path.abspath(base / environment.python)
        return replace(
            config,
            cache=str(Path(config.cache).expanduser()) if config.cache else "",
            model=replace(model, path=place(model.path), tokenizer=place(model.tokenizer)),
            dataset=replace(dataset, train=place(dataset.train), held_out=place(dataset.held_out)),
            environment=replace(environment, python=python),  # as it is: links lead out of a venv
            models=replace(config.models, **frozen),
            reward=replace(
                config.reward, judge=replace(judge, template=jobmodels.filled(judge, base))
            ),
            evaluation=replace(evaluation, datasets=held),
            sandbox=replace(config.sandbox, python=jobsandbox.absolute(config.sandbox, base)),
        )

    def _values(self, config: JobConfig) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name):
            raise self.fail("name", f"name {config.name!r} must be letters, digits, '.', '_', '-'")
        for key, allowed in CHOICES.items():
            if (value := at(config, key)) not in allowed:
                raise self.fail(key, f"{key} = {value!r} must be one of {', '.join(allowed)}")
        for key, least in AT_LEAST.items():
            if (number := at(config, key)) < least:
                raise self.fail(key, f"{key} = {number} must be at least {least}")
        if config.rollout.temperature <= 0:
            raise self.fail("rollout.temperature", "rollout.temperature must be above 0")
        if not 0 < config.rollout.top_p <= 1:
            raise self.fail("rollout.top_p", "rollout.top_p must be above 0 and at most 1")
        if config.rollout.min_p > 1:
            raise self.fail("rollout.min_p", "rollout.min_p must be at most 1")
        if "" in config.rollout.stop_text:
            raise self.fail("rollout.stop_text", "rollout.stop_text holds an empty text")
        if any(length < 1 for length in config.rollout.lengths):
            raise self.fail("rollout.lengths", "rollout.lengths must all be at least 1")
        self._scheduling(config)
        if config.min_group > config.algorithm.group_size:
            raise self.fail("algorithm.min_group", "algorithm.min_group exceeds the group size")
        scoring = int(bool(config.models.declared))
        training = config.planner.training + config.training.ranks - 1
        if training + config.planner.min_rollout + scoring > config.mesh.workers:
            raise self.fail(
                "mesh.workers",
                f"mesh.workers = {config.mesh.workers} are too few for {training} "
                f"that train and {config.planner.min_rollout} that roll out"
                + (", and one for the job's frozen models" if scoring else ""),
            )

    def _scheduling(self, config: JobConfig) -> None:
        buckets = config.rollout.buckets
        if [b.max_tokens for b in buckets] != sorted({b.max_tokens for b in buckets}):
            raise self.fail("rollout.buckets", "rollout.buckets must rise in max_tokens")
        for bucket in buckets:
            if not (1 <= bucket.batch <= config.rollout.slots and bucket.engines > 0):
                raise self.fail(
                    "rollout.buckets",
                    f"rollout.buckets: batch = {bucket.batch} must lie in 1 to rollout.slots, and "
                    f"engines = {bucket.engines} above 0",
                )
        if config.rollout.pace:
            try:
                profile(config.rollout.pace)
            except ConfigError as error:
                raise self.fail("rollout.pace", error.message, error.fix) from error

    def _files(self, config: JobConfig) -> None:
        model = config.model
        if model.path and not (Path(model.path) / "config.json").is_file():
            raise self.fail("model.path", f"{model.path} holds no config.json")
        if not model.path and not model.config:
            raise self.fail("model", "no model", "Set model.path, or [model.config] for a new one")
        tokenizer = Path(model.tokenizer or Path(model.path) / "tokenizer.json")
        if not tokenizer.is_file():
            raise self.fail("model.tokenizer", f"there is no tokenizer at {tokenizer}")
        taskset = config.environment.verifiers
        if not (config.dataset.train or taskset):
            raise self.fail("dataset", "no dataset", "Set dataset.train to a JSONL or Parquet file")
        prompt = "" if config.environment.use or taskset else config.dataset.prompt
        seen: set[bytes] = set()
        for key in ("dataset.train", "dataset.held_out"):
            if not (name := at(config, key)):
                continue
            if not rows.exists(Path(name)):
                raise self.fail(key, f"there is no file {name}")
            own = set()
            for row in rows.read(Path(name), prompt, chat=bool(config.environment.chat)):
                if row.identity in seen:
                    raise self.fail(key, f"{row.place} is also in dataset.train")
                if config.supervised and key == "dataset.train":
                    jobmodels.answered(config, row, self.fail)
                own.add(row.identity)
            if not own:
                raise self.fail(key, f"{name} holds no rows")
            seen = own
        for d in config.evaluation.datasets:
            found = rows.exists(Path(d.path)) and rows.read(
                Path(d.path), prompt, chat=bool(config.environment.chat)
            )
            if not found or not any(True for _ in found):
                raise self.fail("evaluation.datasets", f"{d.name}: {d.path} holds no rows")

    def _verifiers(self, config: JobConfig) -> None:
        environment = config.environment
        if not environment.verifiers:
            for key in ("environment.python", "environment.verifiers_options"):
                if at(config, key):
                    raise self.fail(key, f"{key} without environment.verifiers")
            for key in ("dataset.tasks", "dataset.held_out_tasks"):
                if at(config, key):
                    raise self.fail(key, f"{key} counts tasks of environment.verifiers")
            return
        for key in ("environment.use", "environment.tools"):
            if at(config, key):
                raise self.fail(key, f"{key}: environment.verifiers brings its own")
        if not environment.chat:
            raise self.fail("environment.verifiers", "environment.verifiers takes environment.chat")
        if not os.access(environment.python, os.X_OK) or not Path(environment.python).is_file():
            raise self.fail(
                "environment.python",
                f"there is no interpreter at {environment.python or 'environment.python'}",
                "Name one of an environment that `pip install verifiers==0.4.0` was run in",
            )

    def _chat(self, config: JobConfig) -> JobConfig:
        """The job with its chat format by name, and the format's stop tokens among its own."""
        environment, path = config.environment, Path(config.model.path)
        if not environment.chat:
            if environment.chat_options:
                raise self.fail("environment.chat_options", "chat_options without environment.chat")
            return config
        tokenizer = Path(config.model.tokenizer or path / "tokenizer.json")
        try:
            name = format_of(path) if environment.chat == "auto" else environment.chat
            chat = Chat.load(name, environment.chat_options, Tokenizer.load(tokenizer))
        except ConfigError as error:
            raise self.fail("environment.chat", f"environment.chat: {error}") from error
        stop = list(dict.fromkeys([*config.rollout.stop, *chat.stop_tokens]))
        return replace(
            config,
            environment=replace(environment, chat=name),
            rollout=replace(config.rollout, stop=stop),
        )

    def _references(self, config: JobConfig, base: Path) -> None:
        reward = config.reward
        rewarded = reward.declared or reward.judge.use or config.environment.use
        if not (
            rewarded
            or config.environment.verifiers
            or config.algorithm.name in jobalgorithm.REWARDLESS
        ):
            raise self.fail("reward", "no reward", 'Set reward.use = "module:function"')
        for key, reference in all_references(config):
            try:
                references.resolve(reference, base)
            except ConfigError as error:
                raise self.fail(key, f"{key}: {error}") from error


def all_references(config: JobConfig) -> Iterator[tuple[str, str]]:
    """(dotted key, module:function) of all code that a job names."""
    for key in REFERENCES:
        if reference := at(config, key):
            yield key, reference
    yield from jobsandbox.references(config)


def at(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _leaves(document: dict[str, Any], known: dict[str, Any], prefix: str = "") -> Iterator[Any]:
    for name, value in document.items():
        key = prefix + name
        if isinstance(value, dict) and value and is_dataclass(known.get(key, JobConfig)):
            yield from _leaves(value, known, key + ".")
        else:
            yield key, value


def _fits(kind: Any, value: Any) -> bool:
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is list:
        return isinstance(value, list) and all(_fits(arguments[0], v) for v in value)
    if origin is dict:
        return isinstance(value, dict) and (
            arguments[1] is Any or all(_fits(arguments[1], v) for v in value.values())
        )
    if is_dataclass(kind):
        return isinstance(value, dict)
    if origin is UnionType:
        return any(_fits(argument, value) for argument in arguments)
    return isinstance(value, origin)


def _name(kind: Any) -> str:
    if is_dataclass(kind):
        return "a table"
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    if get_origin(kind) is list:
        of = "whole numbers" if get_args(kind) == (int,) else "strings"
        return f"a list of {of}"
    if get_origin(kind) is dict:
        return "a table"
    if get_origin(kind) is UnionType:
        return ", or ".join(_name(argument) for argument in get_args(kind))
    return words.get(kind, str(kind))
