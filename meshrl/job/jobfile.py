"""Reads job files: from TOML and `--set` to a checked JobConfig, every error with its line and a
fix.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.job.config import INITIAL, JobConfig
from common.job.pace import profile, training_pace
from common.job.schema import JOB
from common.model.tokenizer import companions
from common.pool.asking import need_of
from common.pool.fitting import tight_floor
from common.records.at_url import is_url
from meshrl.job import references, row_keys, rows, toml_file
from meshrl.job.checks.file import algorithm, engines, experts, extras, models, sandbox, turns

REFERENCES = ("environment.use", "warm_start.demonstrations")


@dataclass(frozen=True, eq=False)
class JobFile:
    """A job file as it was read and checked; equal to itself alone."""

    config: JobConfig  # its paths are absolute
    base: Path  # the directory that it lies in
    fail: Callable[..., ConfigError]  # (key, message, fix): the error that names the key's line


def load(path: Path, overrides: list[str]) -> tuple[JobConfig, Path]:
    """The job that `read` finds in a file, and the directory it lies in."""
    found = read(path, overrides)
    return found.config, found.base


def read(path: Path, overrides: list[str]) -> JobFile:
    """The job that a file describes, with `KEY=VALUE` overrides.

    ConfigError names the line, or the override, that is wrong.
    """
    document, places = toml_file.read(path, "the job file")
    for override in overrides:
        key = apply_override(document, override)
        places = {
            k: place for k, place in places.items() if not k.startswith((f"{key}.", f"{key}["))
        }
        places[key] = f"--set {override}"
    base = path.resolve().parent
    checker = _Checker(path, places)
    return JobFile(checker.check(document, base), base, checker.fail)


def of_config(config: JobConfig, base: Path, overrides: list[str]) -> JobFile:
    """A job that was made in code, with `KEY=VALUE` overrides, checked as a file in `base` is."""
    document = config.document()
    places = {apply_override(document, override): f"--set {override}" for override in overrides}
    checker = _Checker(Path("the job"), places)
    return JobFile(checker.check(document, base), base, checker.fail)


def again(document: dict[str, Any], overrides: list[str]) -> tuple[JobFile, dict[str, Any]]:
    """A run's document with `KEY=VALUE` overrides, checked: as a job file whose files are those of
    the run's bundle, and as the changed document.
    """
    bundle = document["bundle"]
    held = deepcopy({key: value for key, value in document.items() if key != "bundle"})
    places = {apply_override(held, override): f"--set {override}" for override in overrides}
    checker = _Checker(Path("the run"), places)
    config, placed = checker.again(held, Path(bundle["dir"]))
    found = JobFile(placed, Path(bundle["dir"]) / "modules", checker.fail)
    return found, config.document() | {"bundle": bundle}


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
    if JOB.kinds.get(key) is str and not isinstance(value, str):
        value = raw.strip()
    *tables, last = key.split(".")
    place = document
    for table in tables:
        place = place.setdefault(table, {})
        if not isinstance(place, dict):
            raise ConfigError(f"--set {override}: {table} of {key} is not a table")
    place[last] = value
    return key


def _copies(text: str) -> str:
    """`weights.copies` of a run that is changed: a directory counts from where one is."""
    return os.path.abspath(Path(text).expanduser()) if text and not is_url(text) else text


class _Checker:
    """One pass over one job file; holds where each key was written, for the messages."""

    def __init__(self, path: Path, places: dict[str, str]) -> None:
        self.path = path
        self.places = places

    def check(self, document: dict[str, Any], base: Path) -> JobConfig:
        config = self._absolute(JOB.validated(document, self.fail), base)
        config = models.supervised(config, document, self.fail)
        self._sizes(config)
        models.check(config, document, self.fail)
        algorithm.check(config, self.fail)
        sandbox.check(config, self.fail)  # options of rewards, before the rows that they name
        self._files(config, base)
        models.shapes(config, self.fail)
        engines.divides(config, self.fail)
        experts.check(config, self.fail)
        extras.check(config, self.fail)
        self._verifiers(config)
        self._references(config, base)
        return turns.check(config, self.fail)

    def again(self, document: dict[str, Any], bundle: Path) -> tuple[JobConfig, JobConfig]:
        """The job of a run, as its document has it, and with the absolute paths of its bundle."""
        config = JOB.validated(document, self.fail)
        python = config.environment.python and os.path.abspath(config.environment.python)
        config = replace(
            config,
            cache=str(Path(config.cache).expanduser()) if config.cache else "",
            environment=replace(config.environment, python=python),
            weights=replace(config.weights, copies=_copies(config.weights.copies)),
            sandbox=sandbox.absolute(config.sandbox, Path.cwd()),
        )
        placed = in_bundle(config, bundle)
        self._sizes(placed)
        algorithm.check(placed, self.fail)
        models.evaluation_of(placed, self.fail)
        models.shapes(placed, self.fail)
        engines.divides(placed, self.fail)
        experts.check(placed, self.fail)
        extras.check(placed, self.fail)
        sandbox.check(placed, self.fail)
        return config, placed

    def fail(self, key: str, message: str, fix: str = "") -> ConfigError:
        return toml_file.mistake(self.path, self.places, key, message, fix)

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
        copies = config.weights.copies
        python = environment.python and os.path.abspath(base / environment.python)
        return replace(
            config,
            cache=str(Path(config.cache).expanduser()) if config.cache else "",
            model=replace(model, path=place(model.path), tokenizer=place(model.tokenizer)),
            dataset=replace(dataset, train=place(dataset.train), held_out=place(dataset.held_out)),
            environment=replace(environment, python=python),  # as it is: links lead out of a venv
            models=replace(config.models, **frozen),
            reward=replace(
                config.reward, judge=replace(judge, template=models.filled(judge, base, self.fail))
            ),
            evaluation=replace(evaluation, datasets=held),
            weights=replace(config.weights, copies=copies if is_url(copies) else place(copies)),
            sandbox=sandbox.absolute(config.sandbox, base),
        )

    def _sizes(self, config: JobConfig) -> None:
        self._scheduling(config)
        engines.check(config, self.fail)
        if config.min_group > config.algorithm.group_size:
            raise self.fail("algorithm.min_group", "algorithm.min_group exceeds the group size")
        scoring = int(bool(config.models.declared))
        training = config.planner.training + config.training.ranks - 1
        rollout = config.planner.min_rollout * min(config.rollout.tensor_parallel)
        if training + rollout + scoring > config.mesh.workers:
            raise self.fail(
                "mesh.workers",
                f"mesh.workers = {config.mesh.workers} are too few for {training} "
                f"that train and {rollout} that roll out"
                + (", and one for the job's frozen models" if scoring else ""),
            )

        self._pool(config)

    def _pool(self, config: JobConfig) -> None:
        least, most = config.pool.workers.least, config.pool.workers.most
        floor = tight_floor(need_of(config.document()))
        if most and most < least:
            raise self.fail(
                "pool.workers.most",
                f"pool.workers.most = {most} is below pool.workers.least = {least}",
            )
        if most and most < floor:
            raise self.fail(
                "pool.workers.most",
                f"pool.workers.most = {most}, and the job takes {floor}: one for each rank of its "
                "core, one for frozen models, and those of an engine that takes no turns (sglang, "
                "or rollout.tensor_parallel above 1)",
                "Give it more, or 0 for as many as there are",
            )

    def _scheduling(self, config: JobConfig) -> None:
        buckets = config.rollout.buckets
        if [b.max_tokens for b in buckets] != sorted({b.max_tokens for b in buckets}):
            raise self.fail("rollout.buckets", "rollout.buckets must rise in max_tokens")
        for i, bucket in enumerate(buckets):
            if bucket.batch > config.rollout.slots:
                raise self.fail(
                    key := f"rollout.buckets[{i}].batch",
                    f"{key} = {bucket.batch} must lie in 1 to rollout.slots = "
                    f"{config.rollout.slots}",
                )
        for key, pace, read in (
            ("rollout.pace", config.rollout.pace, profile),
            ("training.pace", config.training.pace, training_pace),
        ):
            if pace:
                try:
                    read(pace)
                except ConfigError as error:
                    raise self.fail(key, error.message, error.fix) from error

    def _files(self, config: JobConfig, base: Path) -> None:
        model = config.model
        if model.path and not (Path(model.path) / "config.json").is_file():
            there = "holds no config.json" if Path(model.path).exists() else "does not exist"
            raise self.fail(
                "model.path",
                f"model.path: {model.path} {there}",
                "Name a Hugging Face directory; `hf download OWNER/NAME --local-dir DIRECTORY` "
                "fetches one from the Hub",
            )
        if not model.path and not model.config:
            raise self.fail("model", "no model", "Set model.path, or [model.config] for a new one")
        tokenizer = Path(model.tokenizer or Path(model.path) / "tokenizer.json")
        if not tokenizer.is_file():
            raise self.fail(
                "model.tokenizer",
                f"model.tokenizer: there is no tokenizer at {tokenizer}",
                _convert(tokenizer.parent),
            )
        taskset = config.environment.verifiers
        if not (config.dataset.train or taskset):
            raise self.fail(
                "dataset.train", "no dataset", "Set dataset.train to a JSONL or Parquet file"
            )
        prompt = "" if config.environment.use or taskset else config.dataset.prompt
        keys = row_keys.needed(config, base)
        seen: set[bytes] = set()
        for key in ("dataset.train", "dataset.held_out"):
            if not (name := at(config, key)):
                continue
            if not rows.exists(Path(name)):
                raise self.fail(key, f"{key}: there is no file {name}")
            own = set()
            for row in self._rows(key, name, config, prompt):
                identity = row.identity
                if identity in seen:
                    raise self.fail(key, f"{row.place} is also in dataset.train")
                if config.supervised and key == "dataset.train":
                    models.answered(config, row, self.fail)
                else:
                    self._has(row, keys)
                own.add(identity)
            if not own:
                raise self.fail(key, f"{key}: {name} holds no rows")
            seen = own
        for i, d in enumerate(config.evaluation.datasets):
            key = f"evaluation.datasets[{i}].path"
            if not rows.exists(Path(d.path)):
                raise self.fail(key, f"{key}: there is no file {d.path}")
            empty = True
            for row in self._rows(key, d.path, config, prompt):
                self._has(row, keys)
                empty = False
            if empty:
                raise self.fail(key, f"{key}: {d.path} holds no rows")

    def _has(self, row: rows.Row, keys: list[row_keys.Needed]) -> None:
        if wrong := row_keys.lacking(row, keys):
            raise self.fail(*wrong)

    def _rows(self, key: str, name: str, config: JobConfig, prompt: str) -> Iterator[rows.Row]:
        try:
            yield from rows.read(Path(name), prompt, chat=bool(config.environment.chat))
        except ConfigError as error:
            raise self.fail(key, f"{key}: {error.message}", error.fix) from error
        except OSError as error:
            wrong = f"{key}: {error.filename or name} cannot be read: {error.strerror}"
            raise self.fail(key, wrong, "See that it is a file that you may read") from error

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

    def _references(self, config: JobConfig, base: Path) -> None:
        reward = config.reward
        rewarded = reward.declared or reward.judge.use or config.environment.use
        if not (
            rewarded
            or config.environment.verifiers
            or config.algorithm.name in algorithm.REWARDLESS
        ):
            raise self.fail("reward", "no reward", 'Set reward.use = "module:function"')
        for key, reference in all_references(config):
            try:
                references.resolve(reference, base)
            except ConfigError as error:
                raise self.fail(key, f"{key}: {error}") from error


def in_bundle(config: JobConfig, bundle: Path) -> JobConfig:
    """The job of a run, with the absolute paths of the files in its bundle."""

    def place(text: str) -> str:
        return str(bundle / text) if text else ""

    model, dataset = config.model, config.dataset
    frozen = {
        role: replace(m, path=m.path if m.path == INITIAL else place(m.path))
        for role, m in config.models.declared.items()
    }
    held = [replace(d, path=place(d.path)) for d in config.evaluation.datasets]
    return replace(
        config,
        model=replace(model, path=place(model.path), tokenizer=place(model.tokenizer)),
        dataset=replace(dataset, train=place(dataset.train), held_out=place(dataset.held_out)),
        models=replace(config.models, **frozen),
        evaluation=replace(config.evaluation, datasets=held),
    )


def _convert(directory: Path) -> str:
    """What to do about a tokenizer.json that is missing."""
    older = [f.name for f in companions(directory / "tokenizer.json") if f.suffix == ".model"]
    if not older:
        return "Name a tokenizer.json"
    return (
        f"transformers makes one of {older[0]}: "
        f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
    )


def all_references(config: JobConfig) -> Iterator[tuple[str, str]]:
    """(dotted key, module:function) of all code that a job names."""
    for key in REFERENCES:
        if reference := at(config, key):
            yield key, reference
    yield from sandbox.references(config)


def at(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config
