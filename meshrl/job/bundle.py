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

from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.config import JobConfig
from meshrl.common.job.named_files import TOKENIZER, named_files, put
from meshrl.common.model.tokens.tokenizer import companions
from meshrl.directory.places import write_json
from meshrl.job import edited, references, rows, tasksets
from meshrl.job.model_files import shape

MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def pack_run(
    config: JobConfig,
    base: Path,
    run_dir: Path,
    about: dict[str, Any],
    job_file: Path | None,
) -> dict[str, Any]:
    """Fills a new run's directory with its bundle and `job.json`: `about`, the document, which is
    returned, by what it is told from other runs of its name, and the job file as it is now.
    """
    _, document = pack(config, base, run_dir)
    record = about | {"document": document, "run_id": uuid.uuid4().hex}
    if job_file is not None:
        record["file"] = edited.remembered(job_file)
    write_json(run_dir / "job.json", record)
    return document


def pack(config: JobConfig, base: Path, run_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Write the job's bundle under `run_dir`; returns its directory and the document to submit.

    The document is `config.document()`, paths relative to the bundle, and `bundle: {dir, digest,
    files, parameters, shape}`: `files` has bytes and digest of each file by its name, for who reads
    it to check; `parameters` and `shape` are the model's, for who plans where it fits and what it
    costs.
    """
    home = run_dir / "bundle"
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".packing-") as temporary:
        staging = Path(temporary)
        document = _fill(config, base, staging)
        files = bundle_files.listed(staging)
        digest = bundle_files.digest_of(files)
        target = home / digest
        if not target.is_dir():
            os.rename(staging, target)
            staging.mkdir()  # the context manager removes it
    model = shape(config)
    document["bundle"] = {
        "dir": str(target.resolve()),
        "digest": digest,
        "files": files,
        "parameters": model.parameters,
        "shape": asdict(ModelShape.of(model)),
    }
    return target, document


def _fill(config: JobConfig, base: Path, staging: Path) -> dict[str, Any]:
    document = config.document()
    copy_modules(config, base, staging / "modules")
    drawn: dict[str, list[str]] = {}  # the tasks of a job that trains on a taskset
    if config.environment.verifiers and not config.dataset.train:
        held_out, train = tasksets.tasks(config, staging / "modules")
        drawn = {"dataset.train": train, "dataset.held_out": held_out}
    for file in named_files(config):
        target = staging / file.place
        if lines := drawn.get(file.key):
            _write(target, lines)
        elif file.key == TOKENIZER:
            tokenizer = config.model.tokenizer_file
            _copy(tokenizer, target)
            for name in companions(tokenizer):
                _copy(tokenizer.parent / name, target.parent / name)
        elif not file.path:
            continue
        elif file.has_rows:
            _write(target, (row.line for row in rows.read(Path(file.path))))
        else:
            for pattern in MODEL_FILES:
                for source in sorted(Path(file.path).glob(pattern)):
                    _copy(source, target / source.name)
        put(document, file.key, file.place)
    return document


def copy_modules(config: JobConfig, base: Path, target: Path) -> None:
    """The job's modules with the neighbours that they import, and its MCP servers' files."""
    modules = [reference.partition(":")[0] for _, reference in references.all_references(config)]
    if config.environment.verifiers:
        taskset = tasksets.module_of(config.environment.verifiers)
        modules += [taskset] if references.module_file(base, taskset) else []
    target.mkdir()
    servers = list(_servers(config, base))
    modules += [path.stem for path in servers if path.suffix == ".py" and path.parent == base]
    for source in {*servers, *references.neighbours(base, modules)}:
        _copy(source, target / source.relative_to(base))


def _servers(config: JobConfig, base: Path) -> Iterator[Path]:
    """The files beside the job file that commands of MCP servers name."""
    for command in config.environment.mcp.values():
        for word in command:
            path = base / word
            if not Path(word).is_absolute() and path.is_file() and path.is_relative_to(base):
                yield path


def _write(target: Path, lines: Iterable[str]) -> None:
    target.parent.mkdir(exist_ok=True)
    with target.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
