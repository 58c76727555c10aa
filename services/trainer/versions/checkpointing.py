"""Writer of checkpoints, which `transformers` can read, while training continues."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.api.weights import (
    STORE_NAME,
    Checkpoint,
    CheckpointAssembly,
    UnfinishedCheckpoints,
    Weights,
)
from meshrl.common.base.errors import CorruptData, MeshError, NotFound
from meshrl.common.base.files import corruption
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import group_by_layer
from meshrl.common.model.files.tensor_source import batch_by_bytes
from meshrl.common.records.checkpoints import (
    BASE_MANIFEST_FILE,
    MANIFEST_FILE,
    STATE_FOLDER,
    check_digests,
    find_newest_due_version,
    format_checkpoint_name,
    install_checkpoint,
    list_files,
)
from meshrl.common.state import events
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.manifest import decode_manifest
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.common.weights.store.weight_store_client import (
    assemble_checkpoint,
    fetch_chunk,
    put_file,
)
from meshrl.common.weights.version_writer import VersionWriter
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.gang.state_writers import GangStateWriter, LocalStateWriter
from meshrl.services.trainer.versions.publishing import VersionIdentity, VersionPublisher

SAVE_TIMEOUT_S = 3600.0  # to write a checkpoint, or read one
ABANDONED_ACTION = "the incomplete checkpoint is removed, and the next one is written in full"


class CheckpointWriter:
    """Writer of one checkpoint at a time; `last_name` and `last_step`: of the last durable one."""

    def __init__(
        self,
        mesh: Mesh,
        data: JobData,
        compute: GangCompute,
        config: ModelConfig,
        publisher: VersionPublisher,
        enter_phase: Callable[[str, int], None],
    ) -> None:
        self._mesh, self._data, self._compute, self._config = mesh, data, compute, config
        self._publisher, self._enter_phase = publisher, enter_phase
        self._bulk = BulkClient(mesh)
        self._directory = data.local_run_dir / "checkpoints"  # first location of new checkpoints
        self.last_name, self.last_step = "", -1
        self.pause_s = 0.0  # seconds that the last checkpoint stopped training
        self._write_task: asyncio.Task[None] | None = None
        # step of a written checkpoint, and seconds since its start
        self.on_written: Callable[[int, float], None] = lambda step, took: None

    def is_due(self, step: int, last_step: int) -> bool:
        every = self._data.config.training.checkpoint_every
        return find_newest_due_version(step, every, last_step) == step

    async def clear_unfinished(self, committed: str) -> None:
        """Remove an earlier process's unfinished checkpoints, here and on the run host."""
        store, run = self._mesh.ref(STORE_NAME), self._mesh.host.run_blocking
        await retry(
            self._mesh.clock,
            lambda: store.call(
                Weights.remove_unfinished_checkpoints,
                UnfinishedCheckpoints(self._data.id, committed),
            ),
        )
        if not self._data.is_on_run_host:
            await run(shutil.rmtree, self._directory, True, deadline_s=SAVE_TIMEOUT_S)

    async def begin_checkpoint(
        self, lineage: int, step: int, weights: VersionIdentity, account: dict[str, Any]
    ) -> None:
        """Copy the state and start writing it; wait for the previous checkpoint first."""
        began = self._mesh.clock.monotonic()
        await self.wait_until_written()
        request = Checkpoint(
            job=self._data.id,
            lineage=lineage,
            step=step,
            weights=weights.manifest,
            account=account | {"ranks": self._compute.division.document},
            files={},
            image=weights.published_identity,
            masters=weights.masters_identity,
        )
        name = format_checkpoint_name(lineage, step, weights.manifest)
        # A replaced trainer that wakes writes the same checkpoint to another path.
        scratch = self._directory / f"{name}.{self._mesh.incarnation}"
        saving = self._compute.create_saver(
            scratch / STATE_FOLDER, self._publisher.has_narrow_dtypes
        )
        copied = asyncio.Event()
        self._write_task = asyncio.create_task(self._write(request, name, scratch, saving, copied))
        await copied.wait()
        self.pause_s = self._mesh.clock.monotonic() - began

    async def wait_until_written(self, *, required: bool = False) -> None:
        """Wait until nothing is being written; raise errors if `required`, else log them."""
        writing, self._write_task = self._write_task, None
        if writing is None:
            return
        try:
            async with self._mesh.clock.timeout(SAVE_TIMEOUT_S, "writing a checkpoint"):
                await writing
        except (MeshError, OSError) as error:
            if required:
                raise
            self._mesh.telemetry.log.error("checkpoint", error=str(error))

    async def _write(
        self,
        request: Checkpoint,
        name: str,
        scratch: Path,
        saving: LocalStateWriter | GangStateWriter,
        copied: asyncio.Event,
    ) -> None:
        """Write a checkpoint; set `copied` once training may continue, also on failure."""
        directory = self._data.run_dir / "checkpoints" / name
        run, began = self._mesh.host.run_blocking, self._mesh.clock.monotonic()
        try:
            try:
                for number, names in enumerate(batch_by_bytes(saving.meta_tensors)):
                    await saving.copy(names, number)
            finally:
                copied.set()
            # In-memory copies are written while training continues. Writers know the digests of
            # some files already.
            digests = await saving.finish()
            written = {f"{STATE_FOLDER}/{name}": digest for name, digest in digests.items()}
            self._enter_phase("writing", request.step)
            await self._write_stored(request, scratch, directory)
            try:
                try:
                    await self._install(request, name, scratch, written)
                except NotFound:
                    # An earlier one with the same files stayed, and was quarantined just now.
                    await self._install(request, name, scratch, written)
            except CorruptData as error:
                about = "checkpoint", Path(error.where), error.message, ABANDONED_ACTION
                fields = corruption.make_event_fields(*about, job=self._data.id)
                append = partial(
                    events.append, self._mesh.state, corruption.CORRUPTION_EVENT, fields
                )
                await retry(self._mesh.clock, partial(append, uuid.uuid4().hex))
                raise
        finally:
            await run(shutil.rmtree, scratch, True, deadline_s=SAVE_TIMEOUT_S)
        self.last_name, self.last_step = name, request.step
        self.on_written(request.step, self._mesh.clock.monotonic() - began)

    async def _install(
        self, request: Checkpoint, name: str, scratch: Path, written: dict[str, str]
    ) -> None:
        """Make `scratch` the checkpoint's directory on the run host, and write its manifest.

        Raises:
            CorruptData: A file is not what was `written`.
            NotFound: A sweep quarantined the directory during this call.
        """
        if self._data.is_on_run_host:
            directory = self._data.run_dir / "checkpoints" / name
            files = await self._mesh.host.run_blocking(
                install_checkpoint, scratch, directory, written, deadline_s=SAVE_TIMEOUT_S
            )
        else:
            files = await self._upload_files(name, scratch, written)
        store, checkpoint = self._mesh.ref(STORE_NAME), replace(request, files=files)
        await retry(self._mesh.clock, lambda: store.call(Weights.save_checkpoint, checkpoint))

    async def _write_stored(self, request: Checkpoint, scratch: Path, directory: Path) -> None:
        """Write the version from the store.

        If it is corrupt there, write it to the store again, once, if the current weights are that
        version. They are when nothing is trained before this ends.
        """
        try:
            await self._write_version(request, scratch, directory)
        except (CorruptData, NotFound):
            about = request.lineage, request.step, request.weights
            if not await self._publisher.restage_version(*about):
                raise
            await self._write_version(request, scratch, directory)

    async def _write_version(self, request: Checkpoint, scratch: Path, directory: Path) -> None:
        """Write the version in Hugging Face's format, some tensors at a time, and its manifest."""
        mesh, bulk, run = self._mesh, self._bulk, self._mesh.host.run_blocking
        manifest = await fetch_chunk(mesh, bulk, request.weights, "weights", job=request.job)
        await run(
            (scratch / STATE_FOLDER / MANIFEST_FILE).write_bytes,
            manifest,
            deadline_s=SAVE_TIMEOUT_S,
        )
        if (base := decode_manifest(manifest).base) is not None:
            content = await fetch_chunk(mesh, bulk, base.manifest, "weights", job=request.job)
            await run(
                (scratch / STATE_FOLDER / BASE_MANIFEST_FILE).write_bytes,
                content,
                deadline_s=SAVE_TIMEOUT_S,
            )
        weights = await WeightReceiver(mesh, bulk).open_tensor_source(request.weights)
        outline = weights.meta_tensors
        about = self._data, self._config, outline, scratch, directory
        writer = await run(VersionWriter, *about, deadline_s=SAVE_TIMEOUT_S)
        try:
            for names in group_by_layer(outline):
                await run(
                    writer.add_layers, await weights.read_tensors(names), deadline_s=SAVE_TIMEOUT_S
                )
            await run(writer.finish, deadline_s=SAVE_TIMEOUT_S)
        finally:
            await run(writer.close, deadline_s=SAVE_TIMEOUT_S)

    async def _upload_files(
        self, name: str, scratch: Path, written: dict[str, str]
    ) -> dict[str, str]:
        """Have the store create the checkpoint from the files in `scratch`; CorruptData."""
        mesh, files = self._mesh, {}
        paths = await mesh.host.run_blocking(list_files, scratch, deadline_s=SAVE_TIMEOUT_S)
        for path in paths:
            description = f"{path} of checkpoint {name}"
            files[path] = await put_file(mesh, self._bulk, scratch / path, description)
        check_digests(scratch, files, written)
        await assemble_checkpoint(mesh, CheckpointAssembly(self._data.id, name, files))
        return files
