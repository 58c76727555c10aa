"""Makes a run of a Hugging Face directory: its weights become version 0 in a store of the run's
own, to be listed, compared, pinned, evaluated, and begun from (`RUN/model`).
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshrl.common.api.weights import Tensor
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import Refused
from meshrl.common.base.files import documents
from meshrl.common.base.files.durable import sync, sync_tree
from meshrl.common.base.files.lines import line
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig, ModelConfigSection
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.checkpoint import load_config
from meshrl.common.model.files.rows import StoredRows
from meshrl.common.model.files.safetensors_file import DTYPES
from meshrl.common.model.files.source import nbytes
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.tokens.tokenizer import companions
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.layout.laying import Chunk, Laying, Part, laying
from meshrl.common.weights.layout.manifest import packed
from meshrl.common.weights.staging import StagedVersion, assembled
from meshrl.services.weights.export import fill
from meshrl.services.weights.keeping.records import JobVersions, record_path, write_record
from meshrl.services.weights.keeping.retention import Number
from meshrl.services.weights.making import check_model, making
from meshrl.services.weights.versions.known import StoredVersion as Committed

BLOCK_BYTES = 64 << 20  # of a parameter that are read at a time
TYPES = {"float32": "F32", "bfloat16": "BF16"}
DESCRIPTIONS = ("*.json", "*.txt", "*.model", "*.jinja")  # what is not trained, of a directory
MODEL, TOKENIZER = "model", "tokenizer"  # folders of a bundle


def imported(directory: Path, run: Path, name: str, dtype: str) -> dict[str, Any]:
    """Makes the run, whole or not at all; what is told of its version. NotFound or ConfigError for
    what is no model that loads, Refused where something lies already, StorageFull.
    """
    check_model(directory, run)
    kind = TYPES[dtype]
    config = load_config(directory)
    # Of this name, so that the next import removes what one has left that was killed.
    with making(run.parent / f".{run.name}.importing") as made:
        version = _stage(ChunkStore(made / "store"), name, directory, config, kind)
        document = _describe(made, run, directory, name, dtype, config)
        _record(made, run, name, version)
        there = document["bundle"] | {"dir": str(made / "bundle" / document["bundle"]["digest"])}
        data = JobData.of(name, document | {"bundle": there}, str(made))
        (made / MODEL).mkdir()
        fill(data, Committed(0, version.digest), made / MODEL, run / MODEL)
        sync_tree(made)
        try:
            made.rename(run)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise Refused(f"{run} has come to be meanwhile", fix="Name another --out") from error
        sync(run.parent)
    sizes = sum(piece.size for piece in version.manifest.tensors)
    told = {"manifest": version.digest, "image": version.image, "bytes": sizes}
    return {"run": str(run), "job": name} | told


def _stage(
    chunks: ChunkStore, job: str, directory: Path, config: ModelConfig, dtype: str
) -> StagedVersion:
    """Version 0 in the store, some rows at a time: nobody holds the model whole."""
    stored = StoredRows(directory, config)
    with torch.device("meta"):
        model = Decoder(config, DTYPES[dtype])
    outline = dict(model.named_parameters())
    lay, pieces = Laying(laying(outline, dtype)), list[Tensor]()
    for name, like in outline.items():
        most = max(1, BLOCK_BYTES * len(like) // max(1, nbytes(like)))
        for first in range(0, len(like), most):
            rows = torch.empty_like(like[first : first + most], device="cpu")
            stored.fill(name, like.shape, first, rows)
            part = Part(tuple(like.shape), first, rows)
            pieces += _written(chunks, lay.add({name: part}))
    pieces += _written(chunks, lay.rest())
    version = assembled(job, 0, 0, outline, [lay.laid(pieces)])
    chunks.write(packed(version.manifest))
    return version


def _written(chunks: ChunkStore, full: Iterable[Chunk]) -> list[Tensor]:
    found = []
    for chunk in full:
        digest = chunks.write(chunk.content)
        found += [replace(piece, chunk=digest) for piece in chunk.pieces]
    return found


def _describe(
    scratch: Path, run: Path, directory: Path, name: str, dtype: str, config: ModelConfig
) -> dict[str, Any]:
    """Writes the bundle, of what is not trained, and `job.json`; the job's document."""
    staging = scratch / "bundle" / "packing"
    for pattern in DESCRIPTIONS:
        for file in sorted(directory.glob(pattern)):
            _copy(file, staging / MODEL / file.name)
    tokenizer = directory / "tokenizer.json"
    for part in (Path(tokenizer.name), *companions(tokenizer)):
        _copy(directory / part, staging / TOKENIZER / part)
    listed = bundle_files.listed(staging)
    digest = bundle_files.digest_of(listed)
    staging.rename(staging.with_name(digest))
    section = ModelConfigSection(path=MODEL, tokenizer=f"{TOKENIZER}/tokenizer.json")
    document = JobConfig(name=name, model=section).document()
    document["rollout"]["dtype"] = dtype
    document["budget"]["steps"] = 0  # it trains nothing
    place = str(run.absolute() / "bundle" / digest)
    about = {"dir": place, "digest": digest, "files": listed, "parameters": config.parameters}
    document |= {"bundle": about}
    held = {"job": name, "document": document, "imported": str(directory.absolute())}
    documents.write(scratch / "job.json", held)
    return document


def _record(scratch: Path, run: Path, name: str, version: StagedVersion) -> None:
    first, own = Number(0, 0), str(run.absolute())
    record = JobVersions(name, own, {version.digest: first}, first, version.digest)
    write_record(record_path(scratch / "store", name), record)
    fields = {"job": name, "version": 0, "lineage": 0, "manifest": version.digest}
    fields |= {"image": version.image, "masters": version.masters}
    now_ms = int(SystemClock().wall() * 1000)
    event = {"id": f"{now_ms}-0", "ms": now_ms, "kind": "initial", "fields": fields}
    (scratch / "events.jsonl").write_bytes(line(event, 0))


def _copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)
