"""Requests of a Python program for a run: its job, code and rows as files in a directory.

The child process that runs the job reads them (`run_process`). The directory holds:

    request.json            a JobRequest
    dataset.train.jsonl     rows that were passed, by the key of the job
    modules/                code of the job, which the child completes
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.bundle.source_locations import GENERATED_MODULE
from meshrl.common.job.config import JobConfig
from meshrl.scripting.row_files import write_rows
from meshrl.scripting.source_capture import CodeCapture

REQUEST_FILE, MODULES_FOLDER = "request.json", "modules"
# Keys that name rows, without indexes.
ROW_KEYS = ("dataset.train", "dataset.held_out", "dataset.mix.path", "evaluation.datasets.path")
Config = Mapping[str, Any] | JobConfig | str | os.PathLike[str]


@dataclass(frozen=True)
class JobRequest:
    """Job of a Python program, as plain data."""

    base: str  # directory that relative paths and modules of the job count from
    file: str = ""  # job file whose keys `document` completes; empty: none
    document: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)  # KEY=VALUE
    force: bool = False
    module_roots: dict[str, str] = field(default_factory=dict)  # of further modules, by name

    @property
    def job_file(self) -> Path | None:
        """Path of the job file, if there is one."""
        return Path(self.file) if self.file else None

    @classmethod
    def read(cls, directory: Path) -> JobRequest:
        """Return the request in a directory."""
        return cls(**json.loads((directory / REQUEST_FILE).read_text()))


def write_request(
    config: Config, objects: Mapping[str, Any], overrides: Sequence[str], force: bool
) -> Path:
    """Write a request to a new directory, and return that.

    `objects` has the values of dotted keys that are code or rows; None: no value. Raises
    ConfigError with the key of a value that no other process can have.
    """
    directory = Path(tempfile.mkdtemp(prefix="meshrl-job-"))
    try:
        file, document = _split_config(config)
        for key, value in objects.items():
            if value is not None:
                _set_object(document, key, value)
        converter = _Converter(directory)
        plain = converter.convert("", document)
        base = file.parent if file else Path.cwd()
        request = JobRequest(
            base=str(base),
            file=str(file or ""),
            document=plain,
            overrides=list(overrides),
            force=force,
            module_roots=converter.code.module_roots,
        )
        (directory / REQUEST_FILE).write_text(json.dumps(asdict(request)))
        (directory / MODULES_FOLDER).mkdir()
        if converter.code.text:
            path = directory / MODULES_FOLDER / f"{GENERATED_MODULE}.py"
            path.write_text(converter.code.text, encoding="utf-8")
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory


def _split_config(config: Config) -> tuple[Path | None, dict[str, Any]]:
    """Return the absolute path of a job file, if the configuration is one, and the keys."""
    if isinstance(config, Mapping):
        return None, _copy_tables(config)
    if isinstance(config, JobConfig):
        return None, config.to_document()
    if isinstance(config, str | os.PathLike):
        return Path(config).absolute(), {}
    raise ConfigError(
        f"the config is of type {type(config).__name__}",
        fix="Pass a dict of the job file's tables, or the path of a job file",
    )


def _copy_tables(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name): _copy_tables(item) if isinstance(item, dict) else item
        for name, item in value.items()
    }


def _set_object(document: dict[str, Any], key: str, value: Any) -> None:
    table_name, _, name = key.partition(".")
    table = document.setdefault(table_name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"config[{table_name!r}] must be a dict, not {table!r:.60}")
    if table.get(name):
        raise ConfigError(
            f"config[{table_name!r}][{name!r}] is set, and so is the argument for it",
            fix="Give only one of them",
        )
    table[name] = value


class _Converter:
    """Converter of a configuration to plain data; code and rows are replaced by references."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.code = CodeCapture()

    def convert(self, key: str, value: Any) -> Any:
        is_path = isinstance(value, os.PathLike)
        if re.sub(r"\[\d+\]", "", key) in ROW_KEYS and not (is_path or isinstance(value, str)):
            path = self._directory / f"{key}.jsonl"
            write_rows(key, value, path)
            return str(path)
        if isinstance(value, Mapping):
            return {
                str(name): self.convert(f"{key}.{name}" if key else str(name), item)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.convert(f"{key}[{i}]", item) for i, item in enumerate(value)]
        if is_path:
            return os.fspath(value)
        if isinstance(value, bool | int | float | str):
            return value
        if callable(value) or key.endswith(".use"):
            return self.code.add(key, value)
        if value is None:
            raise ConfigError(f"{key} is None", fix="Leave the key out to have its default")
        raise ConfigError(
            f"{key} is of type {type(value).__name__}",
            fix="Use numbers, text, lists and dicts; code and rows have keys of their own",
        )


def make_text_translator(directory: Path) -> Callable[[str], str]:
    """Return a function that replaces paths in a request's directory by what the author wrote."""
    rows = re.compile(re.escape(f"{directory}/") + r"([\w.\[\]]+)\.jsonl(?:, line (\d+))?")
    modules = f"{directory / MODULES_FOLDER}/"

    def name_rows(found: re.Match[str]) -> str:
        return f"{found[1]}[{int(found[2]) - 1}]" if found[2] else "the list"

    return lambda text: rows.sub(name_rows, text).replace(modules, "")
