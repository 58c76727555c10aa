"""Restoration of the learner from the newest intact checkpoint."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from meshrl.common.api.calls.interface import Call
from meshrl.common.api.weights import (
    STORE_NAME,
    Checkpoint,
    CheckpointName,
    CheckpointQuarantine,
    ChunkVerification,
    Manifest,
    Weights,
)
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import BadMessage, ConfigError, CorruptData, MeshError, NotFound
from meshrl.common.base.files import corruption
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.initial_parameters import PretrainedParameters
from meshrl.common.model.files.safetensors_writer import DTYPES
from meshrl.common.model.network.lora import is_adapter_tensor, load_adapter
from meshrl.common.records.checkpoints import BASE_MANIFEST_FILE, MANIFEST_FILE, STATE_FOLDER
from meshrl.common.state import events
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.manifest import decode_manifest, group_by_chunk, merge_base
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.common.weights.store.weight_store_client import put_chunk
from meshrl.common.weights.version_writer import ADAPTER_FOLDER, BASE_FOLDER
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.rows.checkpoint_access import open_checkpoint_files
from meshrl.services.trainer.steps.training_step import EnterPhase
from meshrl.services.trainer.versions.checkpointing import SAVE_TIMEOUT_S

P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


class CheckpointRestorer:
    def __init__(
        self,
        mesh: Mesh,
        bulk: BulkClient,
        data: JobData,
        compute: GangCompute,
        enter_phase: EnterPhase,
    ) -> None:
        self._mesh, self._bulk, self._data = mesh, bulk, data
        self._compute, self._enter_phase = compute, enter_phase
        self._directory = data.run_dir / "checkpoints"  # on the run host

    async def restore_newest(self, newest_name: str) -> tuple[str, Checkpoint]:
        """Restore the checkpoint `newest_name`, or the newest intact one before it.

        Corrupt checkpoints are quarantined. Raise ConfigError if none is intact.
        """
        first: MeshError | None = None
        earlier = (
            await self._call_store(
                Weights.list_older_checkpoints, CheckpointName(self._data.id, newest_name)
            )
        ).names
        for name, before in zip([newest_name, *earlier], [*earlier, ""], strict=True):
            try:
                checkpoint = await self._call_store(
                    Weights.load_checkpoint, CheckpointName(self._data.id, name)
                )
                await self.restore(name, checkpoint)
            except (CorruptData, NotFound) as error:
                first = first or error
                path = _get_error_path(error, self._directory / f"{name}.json")
                failing = "the job fails: no other checkpoint exists"
                then = f"training continues from {before}" if before else failing
                op, fields = uuid.uuid4().hex, self._log_corruption("checkpoint", path, error, then)
                await self._call_store(
                    Weights.quarantine_checkpoint,
                    CheckpointQuarantine(self._data.id, name, op, fields),
                )
                # The store appends it itself if there was something to quarantine.
                await self._append_event(fields, op)
            else:
                return name, checkpoint
        raise ConfigError(
            f"no checkpoint of the run is complete: {first.message if first else ''}",
            where=str(_get_error_path(first, self._directory / f"{newest_name}.json")),
            fix=f"Put {newest_name}.json and the directory {newest_name} back below "
            f"{self._directory} from a "
            f"copy, and resume; or start over: meshrl run JOB. Corrupt files are in "
            f"{self._data.run_dir / corruption.QUARANTINE_DIRECTORY}",
        )

    async def restore(self, name: str, checkpoint: Checkpoint) -> None:
        """Restore the learner from a checkpoint, and its version in the store.

        Raise CorruptData or NotFound if a file that the learner resumes from is corrupt or missing;
        the learner must then be restored in another way.
        """
        self._enter_phase("restoring", checkpoint.step)
        about = name, checkpoint.files, checkpoint.weights
        async with self._open_files(name, checkpoint, STATE_FOLDER) as directory:
            try:
                await self._compute.restore(*about, directory / STATE_FOLDER)
            except (CorruptData, NotFound) as error:
                await self._rebuild_version(name, checkpoint, error)
                await self._compute.restore(*about, directory / STATE_FOLDER)
        await self._ensure_version(name, checkpoint)

    async def repair_version(self, name: str, manifest: str) -> bool:
        """Rebuild an incomplete version from this checkpoint; return True if it is complete."""
        try:
            await self._ensure_version(
                name,
                await self._call_store(
                    Weights.load_checkpoint, CheckpointName(self._data.id, name)
                ),
            )
            await self._check_version(manifest)
        except (CorruptData, NotFound) as error:
            self._mesh.telemetry.log.error(
                "weights could not be rebuilt", checkpoint=name, error=str(error)
            )
            return False
        return True

    async def _ensure_version(self, name: str, checkpoint: Checkpoint) -> None:
        try:
            await self._check_version(checkpoint.weights)
        except (CorruptData, NotFound) as error:
            await self._rebuild_version(name, checkpoint, error)

    async def _check_version(self, manifest: str) -> None:
        """Raise CorruptData or NotFound unless the store has a version's chunks and base."""
        found = await WeightReceiver(self._mesh, self._bulk).fetch_manifest(manifest)
        base = [found.base.manifest] if found.base is not None else []
        for digest in dict.fromkeys([manifest, *base, *(one.chunk for one in found.tensors)]):
            examine = ChunkVerification(digest, "weights", self._data.id)
            if not await self._call_store(Weights.verify_chunk, examine):
                raise NotFound(f"chunk {digest} of version {manifest} is not in the store")

    def _open_files(
        self, name: str, checkpoint: Checkpoint, below: str
    ) -> AbstractAsyncContextManager[Path]:
        about = self._mesh, self._bulk, self._data, name, checkpoint.files, [below]
        return open_checkpoint_files(*about)

    async def _call_store(self, method: Call[Q, R], request: Q) -> R:
        store = self._mesh.ref(STORE_NAME)
        return await retry(self._mesh.clock, lambda: store.call(method, request))

    async def _rebuild_version(
        self, name: str, checkpoint: Checkpoint, error: CorruptData | NotFound
    ) -> None:
        """Write a checkpoint's version to the store again, from the model in its directory.

        Raise `error` if that model is not the version any more.
        """
        mesh, run = self._mesh, self._mesh.host.run_blocking
        async with self._open_files(name, checkpoint, "") as directory:
            content = await self._run_read((directory / STATE_FOLDER / MANIFEST_FILE).read_bytes)
            manifest = await self._run_read(decode_manifest, content)
            if manifest.base is not None:
                there = directory / STATE_FOLDER / BASE_MANIFEST_FILE
                base = await self._run_read(there.read_bytes)
                manifest = merge_base(manifest, await self._run_read(decode_manifest, base))
                await put_chunk(mesh, self._bulk, base, f"the manifest of the base of {name}")
            about = self._data, load_model_config(self._data), manifest, directory
            model = await self._run_read(VersionRebuilder, *about)
            for digest in model.chunks:
                chunk = await self._run_read(model.build_chunk, digest)
                if await run(compute_digest, chunk, deadline_s=SAVE_TIMEOUT_S) != digest:
                    raise error
                await put_chunk(mesh, self._bulk, chunk, f"chunk {digest} of {name}")
        if (
            await put_chunk(mesh, self._bulk, content, f"the manifest of {name}")
            != checkpoint.weights
        ):
            raise error
        path = _get_error_path(error, Path(checkpoint.weights))
        then = f"rewritten from {self._directory / name}"
        await self._append_event(self._log_corruption("weights", path, error, then))

    async def _run_read(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that reads a checkpoint's model; CorruptData if it is not the job's."""
        try:
            call = partial(read, *args, **kwargs)
            return await self._mesh.host.run_blocking(call, deadline_s=SAVE_TIMEOUT_S)
        except (ConfigError, BadMessage, OSError) as error:
            where = error.where if isinstance(error, MeshError) else str(error.filename or "")
            why = f"the model of a checkpoint cannot be read: {error}"
            raise CorruptData(why, where=where) from error

    def _log_corruption(
        self, kind: str, path: Path, error: MeshError, action: str
    ) -> dict[str, Any]:
        self._mesh.telemetry.log.error("damaged", path=str(path), why=error.message, then=action)
        return corruption.make_event_fields(kind, path, error.message, action, job=self._data.id)

    async def _append_event(self, fields: dict[str, Any], op: str = "") -> None:
        state, op = self._mesh.state, op or uuid.uuid4().hex
        await retry(
            self._mesh.clock, lambda: events.append(state, corruption.CORRUPTION_EVENT, fields, op)
        )


def _get_error_path(error: MeshError | None, fallback: Path) -> Path:
    """Return the path that an error names; other processes prefix it with their address."""
    named = error is not None and error.where.startswith("/")
    return Path(error.where) if error is not None and named else fallback


class VersionRebuilder:
    """Contents of a version's chunks, rebuilt from a checkpoint's model. It blocks."""

    def __init__(
        self, data: JobData, config: ModelConfig, manifest: Manifest, directory: Path
    ) -> None:
        """Open the model of a version's checkpoint `directory`; ConfigError if it is unreadable."""
        self.chunks = group_by_chunk(manifest.tensors)
        like = {
            piece.name: torch.empty(piece.shape, dtype=DTYPES[piece.dtype], device="meta")
            for piece in manifest.tensors
            if is_adapter_tensor(piece.name)
        }
        self._adapters = load_adapter(directory / ADAPTER_FOLDER, config, like) if like else {}
        model = directory
        if like:  # beside the merged model, unless the base is the job's initial model
            own = directory / BASE_FOLDER
            model = own if own.is_dir() else data.bundle / data.config.model.path
        self._parameters = PretrainedParameters(model, config)

    def build_chunk(self, digest: str) -> memoryview:
        """Return the content of a chunk of the manifest; it differs if its digest does."""
        pieces = self.chunks[digest]
        found = torch.empty(max(p.offset + p.size_bytes for p in pieces), dtype=torch.uint8)
        for piece in pieces:
            dtype, shape = DTYPES[piece.dtype], torch.Size(piece.shape)
            if piece.name in self._adapters:
                flat = self._adapters[piece.name].to(dtype).reshape(-1)
                flat = flat[piece.begin : piece.end].contiguous()
            else:
                width = max(1, math.prod(shape[1:]))  # of a row
                first, last = piece.begin // width, -(-piece.end // width)
                rows = torch.empty(last - first, *shape[1:], dtype=dtype)
                self._parameters.fill_rows(piece.name, shape, first, rows)
                flat = rows.reshape(-1)[piece.begin - first * width : piece.end - first * width]
            found[piece.offset : piece.offset + piece.size_bytes].copy_(flat.view(torch.uint8))
        return found.numpy().data
