"""Reader of job files, from TOML and `--set` to a checked JobConfig; errors have line and fix."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.files.remote_directory import is_url
from meshrl.common.job.config import JobConfig, add_stored_defaults
from meshrl.common.job.learning_rates import describe_high_rates
from meshrl.common.job.named_files import NamedFile, replace_paths
from meshrl.common.job.renamed_keys import RENAMED_JOB_KEYS
from meshrl.common.job.schema import JOB_SCHEMA
from meshrl.job import hub_origins
from meshrl.job.checks.job_file import all_checks, chat_format, files, judge_and_evaluation, sandbox
from meshrl.job.defaults import choices
from meshrl.job.hub.repository import is_hub_id
from meshrl.job.job_file import JobFile
from meshrl.job.toml import reader

CollectModules = Callable[[JobConfig], Path]  # it collects a job's modules in a directory


def load_config(path: Path, overrides: list[str]) -> tuple[JobConfig, Path]:
    """Return the job that `read_job_file` finds in a file, and the file's directory."""
    found = read_job_file(path, overrides)
    return found.config, found.base


def read_job_file(path: Path, overrides: list[str]) -> JobFile:
    """Return the job that a file describes, with `KEY=VALUE` overrides.

    Raises ConfigError with the wrong line or override.
    """
    return read_document({}, overrides, path.resolve().parent, path)


def check_config(config: JobConfig, base: Path, overrides: list[str]) -> JobFile:
    """Return a job that was made in code, with `KEY=VALUE` overrides, checked as a file in `base`
    is.
    """
    return read_document(config.to_document(), overrides, base)


def read_document(
    document: dict[str, Any],
    overrides: list[str],
    base: Path,
    path: Path | None = None,
    collect_modules: CollectModules | None = None,
) -> JobFile:
    """Return the checked job of a document, which completes the job file `path` if there is one.

    `base` is the directory of files and modules, unless `collect_modules` returns that of modules.
    Raises ConfigError with the wrong key, line or override.
    """
    places: dict[str, str] = {}
    if path is not None:
        from_file, places = reader.read_toml(path, "the job file")
        document = merge_tables(from_file, document)
    for override in overrides:
        key = apply_override(document, override)
        places = {
            k: place for k, place in places.items() if not k.startswith((f"{key}.", f"{key}["))
        }
        places[key] = f"--set {override}"
    return _check_document(document, base, path or Path("the job"), places, collect_modules)


def merge_tables(document: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the keys of another, which win."""
    merged = dict(document)
    for key, value in more.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            value = merge_tables(old, value)
        merged[key] = value
    return merged


def reload_document(
    document: dict[str, Any], overrides: list[str]
) -> tuple[JobFile, dict[str, Any]]:
    """Return a run's document with `KEY=VALUE` overrides, checked.

    It is returned as a job file whose files are those of the run's bundle, and as the changed
    document.
    """
    bundle = document["bundle"]
    changed_document = deepcopy({key: value for key, value in document.items() if key != "bundle"})
    add_stored_defaults(changed_document)
    places = {
        apply_override(changed_document, override): f"--set {override}" for override in overrides
    }
    fail = partial(reader.make_error, Path("the run"), places)
    config = _resolve_paths(JOB_SCHEMA.validate(changed_document, fail), Path.cwd())
    home = Path(bundle["dir"])
    config_here = replace_paths(config, lambda file: str(home / file.path))
    found = JobFile(config_here, home / "modules", fail)
    all_checks.check_changed_document(found)
    if overrides:  # else the run has had the warning at its start
        _warn_of_high_rates(found, "Lower it")
    return found, config.to_document() | {"bundle": bundle}


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
    if JOB_SCHEMA.types_by_key.get(RENAMED_JOB_KEYS.get(key, key)) is str and not isinstance(
        value, str
    ):
        value = raw.strip()
    *tables, last = key.split(".")
    place = document
    for table in tables:
        place = place.setdefault(table, {})
        if not isinstance(place, dict):
            raise ConfigError(f"--set {override}: {table} of {key} is not a table")
    place[last] = value
    return key


def _check_document(
    document: dict[str, Any],
    base: Path,
    path: Path,
    locations: Mapping[str, str],
    collect_modules: CollectModules | None,
) -> JobFile:
    """Return the checked job of a document from the file `path`, with the locations of its keys."""
    fail = partial(reader.make_error, path, locations)
    for notice in JOB_SCHEMA.describe_old_keys(document):
        print(f"{path}: {notice}", file=sys.stderr)
    document = choices.drop_automatic(document)
    found = JobFile(JOB_SCHEMA.validate(document, fail), base, fail, document)
    config = _resolve_paths(found.config, base)
    config = replace_paths(config, partial(_resolve_file, base))
    hub_origins.forget_commits()
    config = hub_origins.resolve_models(found.with_config(config)).config
    reward = replace(config.reward, judge=judge_and_evaluation.load_judge_template(found))
    found = all_checks.complete_group_size(found.with_config(replace(config, reward=reward)))
    found = choices.choose_values(found)
    if collect_modules is not None:
        found = replace(found, base=collect_modules(found.config))
    all_checks.check_job_file(found)
    _warn_of_high_rates(found, 'Lower it, or write "auto"')
    return files.complete_steps(found.with_config(chat_format.resolve_chat(found)))


def _warn_of_high_rates(job: JobFile, fix: str) -> None:
    for key, warning in describe_high_rates(job.config).items():
        print(f"warning: {job.make_error(key, warning, fix)}", file=sys.stderr)


def _resolve_file(base: Path, file: NamedFile) -> str:
    """Return the absolute path of a file, or the Hub id that is no existing path."""
    path = base / Path(file.path).expanduser()
    can_be_id = (file.is_model or file.is_dataset) and is_hub_id(file.path)
    return file.path if can_be_id and not path.exists() else str(path.resolve())


def _resolve_paths(config: JobConfig, base: Path) -> JobConfig:
    """Return the configuration with absolute paths of this host's programs and directories.

    Relative paths count from `base`.
    """
    copies = config.weights.copies
    if copies and not is_url(copies):
        copies = str((base / Path(copies).expanduser()).resolve())
    # The interpreter stays as it is: links lead out of a virtual environment.
    python = config.environment.python and os.path.abspath(base / config.environment.python)
    return replace(
        config,
        cache=str(Path(config.cache).expanduser()) if config.cache else "",
        environment=replace(config.environment, python=python),
        weights=replace(config.weights, copies=copies),
        sandbox=sandbox.resolve_paths(config.sandbox, base),
    )
