"""Writes checkpoints, which `transformers` reads, while training goes on."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.api.weights import STORE, Checkpoint, Clear, LayOut, Weights
from meshrl.common.base.errors import Damaged, MeshError, NotFound
from meshrl.common.base.files import damage
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf import by_layer
from meshrl.common.model.files.source import batches
from meshrl.common.records.checkpoints import (
    BASE_MANIFEST,
    MANIFEST,
    STATE,
    appear,
    check_written,
    checkpoint_name,
    files_below,
    newest_due,
)
from meshrl.common.state import events
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.manifest import unpacked
from meshrl.common.weights.output import VersionWriter
from meshrl.common.weights.receive import Receiver
from meshrl.common.weights.store.weight_store import get, lay_out, put_file
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.gang.saving import GangSaving, LocalSaving
from meshrl.services.trainer.versions.publishing import Publisher, VersionIdentity

SAVE_S = 3600.0  # to write a checkpoint, or read one
GIVEN_UP = "what was begun of the checkpoint is removed, and the next one is written anew"


class Checkpoints:
    """One is written at a time; `name` and `step` are of the last that is durable."""

    def __init__(
        self,
        mesh: Mesh,
        data: JobData,
        compute: Compute,
        config: ModelConfig,
        publisher: Publisher,
        enter: Callable[[str, int], None],
    ) -> None:
        self._mesh, self._data, self._compute, self._config = mesh, data, compute, config
        self._publisher, self._enter = publisher, enter
        self._bulk = BulkClient(mesh)
        self._directory = data.here / "checkpoints"  # where they are written first
        self.name, self.step = "", -1
        self.pause_s = 0.0  # seconds that training stood still for the last checkpoint
        self._writing: asyncio.Task[None] | None = None
        # which step's was written, and how long ago that began, seconds
        self.timed: Callable[[int, float], None] = lambda step, took: None

    def due(self, step: int) -> bool:
        config = self._data.config
        return newest_due(step, config.training.checkpoint_every, config.budget.steps) == step

    async def clear(self, committed: str) -> None:
        """Remove what an earlier start has begun and not ended, here and at the run's home."""
        store, run = self._mesh.ref(STORE), self._mesh.host.run_blocking
        await patiently(
            self._mesh.clock, lambda: store.call(Weights.clear, Clear(self._data.id, committed))
        )
        if not self._data.at_home:
            await run(shutil.rmtree, self._directory, True, deadline_s=SAVE_S)

    async def begin(
        self, lineage: int, step: int, weights: VersionIdentity, account: dict[str, Any]
    ) -> None:
        """Copies what must be kept and goes on writing it; waits for the one before."""
        began = self._mesh.clock.monotonic()
        await self.settled()
        request = Checkpoint(
            job=self._data.id,
            lineage=lineage,
            step=step,
            weights=weights.manifest,
            account=account | {"ranks": self._compute.division.told},
            files={},
            image=weights.image,
            masters=weights.masters,
        )
        name = checkpoint_name(lineage, step, weights.manifest)
        # Whoever else writes it, a trainer that was replaced and wakes, writes the same elsewhere.
        scratch = self._directory / f"{name}.{self._mesh.incarnation}"
        saving = self._compute.saving(scratch / STATE, self._publisher.narrow)
        copied = asyncio.Event()
        self._writing = asyncio.create_task(self._write(request, name, scratch, saving, copied))
        await copied.wait()
        self.pause_s = self._mesh.clock.monotonic() - began

    async def settled(self, *, required: bool = False) -> None:
        """Return when nothing is written; what fails comes next time, unless `required`."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            async with self._mesh.clock.timeout(SAVE_S, "a checkpoint"):
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
        saving: LocalSaving | GangSaving,
        copied: asyncio.Event,
    ) -> None:
        """`copied` is set once training may go on, also when this fails."""
        directory = self._data.run_dir / "checkpoints" / name
        run, began = self._mesh.host.run_blocking, self._mesh.clock.monotonic()
        try:
            try:
                for number, names in enumerate(batches(saving.outline)):
                    await saving.copy(names, number)
            finally:
                copied.set()
            # What was copied in memory is written while training goes on. Of some files the digests
            # of the bytes as they were written are known.
            digests = await saving.end()
            written = {f"{STATE}/{name}": digest for name, digest in digests.items()}
            self._enter("writing", request.step)
            await self._write_stored(request, scratch, directory)
            try:
                if self._data.at_home:
                    files = await run(appear, scratch, directory, written, deadline_s=SAVE_S)
                else:
                    files = await self._sent(name, scratch, written)
            except Damaged as error:
                about = "checkpoint", Path(error.where), error.message, GIVEN_UP
                told = damage.fields(*about, job=self._data.id)
                append = partial(events.append, self._mesh.state, damage.EVENT, told)
                await patiently(self._mesh.clock, partial(append, uuid.uuid4().hex))
                raise
        finally:
            await run(shutil.rmtree, scratch, True, deadline_s=SAVE_S)
        store = self._mesh.ref(STORE)
        whole = replace(request, files=files)
        await patiently(self._mesh.clock, lambda: store.call(Weights.save, whole))
        self.name, self.step = name, request.step
        self.timed(request.step, self._mesh.clock.monotonic() - began)

    async def _write_stored(self, request: Checkpoint, scratch: Path, directory: Path) -> None:
        """The version as the store holds it. What is damaged there is written again, once, if the
        weights are that version still, as they are when nothing is trained before this is done.
        """
        try:
            await self._write_version(request, scratch, directory)
        except (Damaged, NotFound):
            about = request.lineage, request.step, request.weights
            if not await self._publisher.stage_again(*about):
                raise
            await self._write_version(request, scratch, directory)

    async def _write_version(self, request: Checkpoint, scratch: Path, directory: Path) -> None:
        """Write it as Hugging Face does, some tensors at a time; its manifest to the state."""
        mesh, bulk, run = self._mesh, self._bulk, self._mesh.host.run_blocking
        manifest = await get(mesh, bulk, request.weights, "weights", job=request.job)
        await run((scratch / STATE / MANIFEST).write_bytes, manifest, deadline_s=SAVE_S)
        if (base := unpacked(manifest).base) is not None:
            content = await get(mesh, bulk, base.digest, "weights", job=request.job)
            await run((scratch / STATE / BASE_MANIFEST).write_bytes, content, deadline_s=SAVE_S)
        weights = await Receiver(mesh, bulk).source(request.weights)
        outline = weights.outline
        about = self._data, self._config, outline, scratch, directory
        writer = await run(VersionWriter, *about, deadline_s=SAVE_S)
        try:
            for names in by_layer(outline):
                await run(writer.add, await weights.some(names), deadline_s=SAVE_S)
            await run(writer.finish, deadline_s=SAVE_S)
        finally:
            await run(writer.close, deadline_s=SAVE_S)

    async def _sent(self, name: str, scratch: Path, written: dict[str, str]) -> dict[str, str]:
        """Have the store make the directory of the files in `scratch`; Damaged."""
        mesh, files = self._mesh, {}
        paths = await mesh.host.run_blocking(files_below, scratch, deadline_s=SAVE_S)
        for path in paths:
            said = f"{path} of checkpoint {name}"
            files[path] = await put_file(mesh, self._bulk, scratch / path, said)
        check_written(scratch, files, written)
        await lay_out(mesh, LayOut(self._data.id, name, files))
        return files
