"""Import of a Hugging Face directory as a run with a store of its own.

Its weights become version 0, to be listed, compared, pinned, evaluated, and trained from
(`RUN/model`).
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshrl.common.api.weights import TensorPiece
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import Refused
from meshrl.common.base.files import documents
from meshrl.common.base.files.disk_sync import fsync_path, fsync_tree
from meshrl.common.base.files.json_lines import encode_row
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig, TrainedModelConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.initial_parameters import PretrainedParameters
from meshrl.common.model.files.model_directory import load_config
from meshrl.common.model.files.safetensors_writer import DTYPES
from meshrl.common.model.files.tensor_source import count_bytes
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.tokens.tokenizer import list_companion_files
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.layout.chunk_builder import (
    ChunkBuilder,
    StagedChunk,
    TensorRows,
    make_staging_options,
)
from meshrl.common.weights.layout.manifest import encode_manifest
from meshrl.common.weights.staging import StagedVersion, build_version
from meshrl.services.weights.atomic_directories import check_import, scratch_directory
from meshrl.services.weights.export import write_export
from meshrl.services.weights.retention.job_records import JobRecord, record_path, write_record
from meshrl.services.weights.retention.policy import VersionNumber
from meshrl.services.weights.versions.run_versions import StoredVersion as Committed

BLOCK_BYTES = 64 << 20  # of a parameter read at a time
SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16"}
METADATA_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")  # files that are not trained
MODEL_FOLDER, TOKENIZER_FOLDER = "model", "tokenizer"  # folders of a bundle


def import_model(directory: Path, run: Path, name: str, dtype: str) -> dict[str, Any]:
    """Make the run completely or not at all, and return the fields of its version.

    Raises:
        NotFound, ConfigError: The directory has no model that loads.
        Refused: The target exists.
        StorageFull: The disk is full.
    """
    check_import(directory, run)
    kind = SAFETENSORS_TYPES[dtype]
    config = load_config(directory)
    # A fixed name: the next import removes the leftovers of a killed one.
    with scratch_directory(run.parent / f".{run.name}.importing") as scratch:
        version = _stage_version(ChunkStore(scratch / "store"), name, directory, config, kind)
        document = _write_job(scratch, run, directory, name, dtype, config)
        _write_records(scratch, run, name, version)
        there = document["bundle"] | {"dir": str(scratch / "bundle" / document["bundle"]["digest"])}
        data = JobData.from_document(name, document | {"bundle": there}, str(scratch))
        (scratch / MODEL_FOLDER).mkdir()
        write_export(data, Committed(0, version.digest), scratch / MODEL_FOLDER, run / MODEL_FOLDER)
        fsync_tree(scratch)
        try:
            scratch.rename(run)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise Refused(
                f"another process has created {run} during the import", fix="Name another --out"
            ) from error
        fsync_path(run.parent)
    sizes = sum(piece.size_bytes for piece in version.manifest.tensors)
    fields = {"manifest": version.digest, "image": version.published_identity, "bytes": sizes}
    return {"run": str(run), "job": name} | fields


def _stage_version(
    chunks: ChunkStore, job: str, directory: Path, config: ModelConfig, dtype: str
) -> StagedVersion:
    """Stage version 0 a few rows at a time, so that the model is never in memory completely."""
    stored = PretrainedParameters(directory, config)
    with torch.device("meta"):
        model = Decoder(config, DTYPES[dtype])
    outline = dict(model.named_parameters())
    lay, pieces = ChunkBuilder(make_staging_options(outline, dtype)), list[TensorPiece]()
    for name, like in outline.items():
        most = max(1, BLOCK_BYTES * len(like) // max(1, count_bytes(like)))
        for first in range(0, len(like), most):
            rows = torch.empty_like(like[first : first + most], device="cpu")
            stored.fill_rows(name, like.shape, first, rows)
            part = TensorRows(tuple(like.shape), first, rows)
            pieces += _write_chunks(chunks, lay.add_rows({name: part}))
    pieces += _write_chunks(chunks, lay.take_partial_chunk())
    version = build_version(job, 0, 0, outline, [lay.finish(pieces)])
    chunks.write(encode_manifest(version.manifest))
    return version


def _write_chunks(chunks: ChunkStore, chunks_to_write: Iterable[StagedChunk]) -> list[TensorPiece]:
    found = []
    for chunk in chunks_to_write:
        digest = chunks.write(chunk.content)
        found += [replace(piece, chunk=digest) for piece in chunk.pieces]
    return found


def _write_job(
    scratch: Path, run: Path, directory: Path, name: str, dtype: str, config: ModelConfig
) -> dict[str, Any]:
    """Write the bundle of files that are not trained, and `job.json`; return the job's document."""
    staging = scratch / "bundle" / "packing"
    for pattern in METADATA_PATTERNS:
        for file in sorted(directory.glob(pattern)):
            _copy_file(file, staging / MODEL_FOLDER / file.name)
    tokenizer = directory / "tokenizer.json"
    for part in (Path(tokenizer.name), *list_companion_files(tokenizer)):
        _copy_file(directory / part, staging / TOKENIZER_FOLDER / part)
    listed = bundle_files.list_files(staging)
    digest = bundle_files.compute_digest(listed)
    staging.rename(staging.with_name(digest))
    section = TrainedModelConfig(path=MODEL_FOLDER, tokenizer=f"{TOKENIZER_FOLDER}/tokenizer.json")
    document = JobConfig(name=name, model=section).to_document()
    document["rollout"]["dtype"] = dtype
    document["budget"]["steps"] = 0  # no training
    place = str(run.absolute() / "bundle" / digest)
    about = {"dir": place, "digest": digest, "files": listed, "parameters": config.num_parameters}
    document |= {"bundle": about}
    record = {"job": name, "document": document, "imported": str(directory.absolute())}
    documents.write(scratch / "job.json", record)
    return document


def _write_records(scratch: Path, run: Path, name: str, version: StagedVersion) -> None:
    first, own = VersionNumber(0, 0), str(run.absolute())
    record = JobRecord(name, own, {version.digest: first}, first, version.digest)
    write_record(record_path(scratch / "store", name), record)
    fields = {"job": name, "version": 0, "lineage": 0, "manifest": version.digest}
    fields |= {"image": version.published_identity, "masters": version.masters_identity}
    now_ms = int(SystemClock().wall() * 1000)
    event = {"id": f"{now_ms}-0", "ms": now_ms, "kind": "initial", "fields": fields}
    (scratch / "events.jsonl").write_bytes(encode_row(event, 0))


def _copy_file(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)
