"""Bundles: the files that a job brings along (code, data, tokenizer, model), packed to run on any
host.

A bundle is a directory `<run>/bundle/<digest>/` whose name is the digest of its content, so that
packing the same job twice gives the same bundle and a bundle never changes under a run:

    modules/            the job's Python modules and the neighbours they import
    data/train.jsonl    rows, blank lines removed
    data/held_out.jsonl
    data/evaluation-NAME.jsonl
    tokenizer/          tokenizer.json and what belongs to it, such as a chat template
    model/              config.json, generation_config.json, *.safetensors
    models/teacher/     the same of each frozen model
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.config import JobConfig
from meshrl.common.job.named_files import TOKENIZER, list_named_files, set_value
from meshrl.common.model.tokens.tokenizer import list_companion_files
from meshrl.directory.directory_paths import write_json
from meshrl.job import (
    dataset_rows,
    demonstrations,
    edited_job_file,
    hub_origins,
    references,
    tasksets,
)
from meshrl.job.job_file import JobFile
from meshrl.job.model_files import describe_models, load_shape
from meshrl.job.row_files.data_source import list_sources

MODEL_FILE_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def pack_run(
    config: JobConfig,
    base: Path,
    run_dir: Path,
    extra_fields: dict[str, Any],
    job_file: Path | None,
) -> dict[str, Any]:
    """Fill a new run's directory with its bundle and `job.json`, and return the document.

    `extra_fields` identify the run among others of its name. The job file is copied as it is now.
    """
    _, document = pack_bundle(config, base, run_dir)
    record = extra_fields | {"document": document, "run_id": uuid.uuid4().hex}
    if job_file is not None:
        record["file"] = edited_job_file.record_job_file(job_file)
    write_json(run_dir / "job.json", record)
    return document


def pack_bundle(config: JobConfig, base: Path, run_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Write the job's bundle under `run_dir`; return its directory and the document to submit.

    The document is `config.to_document()`, with paths relative to the bundle, and `bundle: {dir,
    digest, files, parameters, shape, models}`. `files` has bytes and digest of each file by its
    name, so that readers can check it. `parameters` and `shape` are the model's, for planning its
    place and cost, and `models` describes all models, for planning memory. `origins` has the
    repository and commit of each key that named a Hub id.
    """
    hub_origins.fetch_weights(JobFile(config, base, _make_unlocated_error))
    origins = hub_origins.find_origins(config)
    home = run_dir / "bundle"
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".packing-") as temporary:
        staging = Path(temporary)
        document = _fill_bundle(config, base, staging)
        files = bundle_files.list_files(staging)
        digest = bundle_files.compute_digest(files)
        target = home / digest
        if not target.is_dir():
            os.rename(staging, target)
            staging.mkdir()  # the context manager removes it
    model = load_shape(config)
    document["bundle"] = {
        "dir": str(target.resolve()),
        "digest": digest,
        "files": files,
        "parameters": model.num_parameters,
        "shape": asdict(ModelShape.from_config(model)),
        "models": describe_models(config),
    }
    if origins:
        document["bundle"]["origins"] = origins
    return target, document


def _fill_bundle(config: JobConfig, base: Path, staging: Path) -> dict[str, Any]:
    document = config.to_document()
    hub_origins.pin_datasets(config, document)
    copy_modules(config, base, staging / "modules")
    drawn: dict[str, list[str]] = {}  # the tasks of a job that trains on a taskset
    if config.environment.verifiers and not config.dataset.trained_paths:
        held_out, train = tasksets.load_tasks(config, staging / "modules")
        drawn = {"dataset.train": train, "dataset.held_out": held_out}
    sources = {source.key: source for source in list_sources(config)}
    for file in list_named_files(config):
        target = staging / file.bundle_path
        if lines := drawn.get(file.key):
            _write_lines(target, lines)
        elif file.key == TOKENIZER:
            tokenizer = config.model.tokenizer_file
            _copy_file(tokenizer, target)
            for name in list_companion_files(tokenizer):
                _copy_file(tokenizer.parent / name, target.parent / name)
        elif not file.path:
            continue
        elif demonstrations.is_counted(config, file.key):
            _write_lines(target, demonstrations.read_usable_lines(config, sources[file.key]))
        elif file.is_dataset:
            rows = dataset_rows.read_rows(sources[file.key])
            _write_lines(target, (row.json_line for row in rows))
        else:
            for pattern in MODEL_FILE_PATTERNS:
                for source in sorted(Path(file.path).glob(pattern)):
                    _copy_file(source, target / source.name)
        set_value(document, file.key, file.bundle_path)
    return document


def _make_unlocated_error(_key: str, message: str, fix: str = "") -> ConfigError:
    return ConfigError(message, fix=fix)


def copy_modules(config: JobConfig, base: Path, target: Path) -> None:
    """Copy the job's modules with the neighbours that they import, and its MCP servers' files."""
    modules = [reference.partition(":")[0] for _, reference in references.find_references(config)]
    if config.environment.verifiers:
        taskset = tasksets.get_module_name(config.environment.verifiers)
        modules += [taskset] if references.find_module_file(base, taskset) else []
    target.mkdir(exist_ok=True)
    servers = list(_find_server_files(config, base))
    modules += [path.stem for path in servers if path.suffix == ".py" and path.parent == base]
    for source in servers:
        _copy_file(source, target / source.relative_to(base))
    copy_local_imports(base, modules, target)


def copy_local_imports(base: Path, modules: list[str], target: Path) -> None:
    """Copy the modules that are files below `base`, with the neighbours that they import."""
    for source in references.find_local_imports(base, modules):
        _copy_file(source, target / source.relative_to(base))


def _find_server_files(config: JobConfig, base: Path) -> Iterator[Path]:
    """Yield the files beside the job file that commands of MCP servers name."""
    for command in config.environment.mcp.values():
        for word in command:
            path = base / word
            if not Path(word).is_absolute() and path.is_file() and path.is_relative_to(base):
                yield path


def _write_lines(target: Path, lines: Iterable[str]) -> None:
    target.parent.mkdir(exist_ok=True)
    with target.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
