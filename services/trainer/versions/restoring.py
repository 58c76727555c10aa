"""Puts the learner where a checkpoint left it: the newest that is whole."""

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
    STORE,
    Checkpoint,
    CheckpointName,
    Examine,
    Manifest,
    SetAside,
    Weights,
)
from meshrl.common.base.digest import digest_of
from meshrl.common.base.errors import BadMessage, ConfigError, Damaged, MeshError, NotFound
from meshrl.common.base.files import damage
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import model_config
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.rows import StoredRows
from meshrl.common.model.files.safetensors_file import DTYPES
from meshrl.common.model.network.lora import is_adapter, load_adapter
from meshrl.common.records.checkpoints import BASE_MANIFEST, MANIFEST, STATE
from meshrl.common.state import events
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.manifest import by_chunk, joined, unpacked
from meshrl.common.weights.output import ADAPTER, BASE
from meshrl.common.weights.receive import Receiver
from meshrl.common.weights.store.weight_store import put
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.rows.checkpoint_files import checkpoint_files
from meshrl.services.trainer.steps.step import Enter
from meshrl.services.trainer.versions.checkpointing import SAVE_S

P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


class Restoring:
    def __init__(
        self, mesh: Mesh, bulk: BulkClient, data: JobData, compute: Compute, enter: Enter
    ) -> None:
        self._mesh, self._bulk, self._data = mesh, bulk, data
        self._compute, self._enter = compute, enter
        self._directory = data.run_dir / "checkpoints"  # at the run's home

    async def usable(self, last: str) -> tuple[str, Checkpoint]:
        """The checkpoint called `last`, or the newest before it that is whole, with the learner in
        its state. What is damaged is set aside. ConfigError when none is whole.
        """
        first: MeshError | None = None
        earlier = (await self._ask(Weights.older, CheckpointName(self._data.id, last))).names
        for name, before in zip([last, *earlier], [*earlier, ""], strict=True):
            try:
                checkpoint = await self._ask(Weights.load, CheckpointName(self._data.id, name))
                await self.restore(name, checkpoint)
            except (Damaged, NotFound) as error:
                first = first or error
                path = _place(error, self._directory / f"{name}.json")
                failing = "the job fails: there is no other"
                then = f"training goes on from {before}" if before else failing
                op, told = uuid.uuid4().hex, self._told("checkpoint", path, error, then)
                await self._ask(Weights.set_aside, SetAside(self._data.id, name, op, told))
                await self._tell(told, op)  # the store has, if there was something to set aside
            else:
                return name, checkpoint
        raise ConfigError(
            f"no checkpoint of the run is whole: {first.message if first else ''}",
            where=str(_place(first, self._directory / f"{last}.json")),
            fix=f"Put {last}.json and the directory {last} back below {self._directory} from a "
            f"copy, and resume; or start over: meshrl run JOB. What is damaged lies in "
            f"{self._data.run_dir / damage.QUARANTINE}",
        )

    async def restore(self, name: str, checkpoint: Checkpoint) -> None:
        """Puts the learner where a checkpoint left it, whose version the store has from then on.
        Damaged or NotFound, and the learner is to be restored otherwise, when a file that it goes
        on from is not what was written.
        """
        self._enter("restoring", checkpoint.step)
        about = name, checkpoint.files, checkpoint.weights
        async with self._files(name, checkpoint, STATE) as directory:
            try:
                await self._compute.restore(*about, directory / STATE)
            except (Damaged, NotFound) as error:
                await self._make_again(name, checkpoint, error)
                await self._compute.restore(*about, directory / STATE)
        await self._see_to_version(name, checkpoint)

    async def mended(self, name: str, manifest: str) -> bool:
        """Whether the store has a version whole, once it has what this checkpoint has of it."""
        try:
            await self._see_to_version(
                name, await self._ask(Weights.load, CheckpointName(self._data.id, name))
            )
            await self._look_for(manifest)
        except (Damaged, NotFound) as error:
            self._mesh.telemetry.log.error("not made again", checkpoint=name, error=str(error))
            return False
        return True

    async def _see_to_version(self, name: str, checkpoint: Checkpoint) -> None:
        try:
            await self._look_for(checkpoint.weights)
        except (Damaged, NotFound) as error:
            await self._make_again(name, checkpoint, error)

    async def _look_for(self, manifest: str) -> None:
        """Damaged or NotFound unless the store has a version whole, as engines need it."""
        found = await Receiver(self._mesh, self._bulk).manifest(manifest)
        base = [found.base.digest] if found.base is not None else []
        for digest in dict.fromkeys([manifest, *base, *(one.chunk for one in found.tensors)]):
            examine = Examine(digest, "weights", self._data.id)
            if not await self._ask(Weights.examine, examine):
                raise NotFound(f"chunk {digest} of version {manifest} is not in the store")

    def _files(
        self, name: str, checkpoint: Checkpoint, below: str
    ) -> AbstractAsyncContextManager[Path]:
        about = self._mesh, self._bulk, self._data, name, checkpoint.files, [below]
        return checkpoint_files(*about)

    async def _ask(self, method: Call[Q, R], request: Q) -> R:
        store = self._mesh.ref(STORE)
        return await patiently(self._mesh.clock, lambda: store.call(method, request))

    async def _make_again(
        self, name: str, checkpoint: Checkpoint, error: Damaged | NotFound
    ) -> None:
        """Writes the version of a checkpoint to the store again, from the model that lies in its
        directory; `error` goes on when that is not the version any more.
        """
        mesh, run = self._mesh, self._mesh.host.run_blocking
        async with self._files(name, checkpoint, "") as directory:
            content = await self._read((directory / STATE / MANIFEST).read_bytes)
            manifest = await self._read(unpacked, content)
            if manifest.base is not None:
                there = directory / STATE / BASE_MANIFEST
                base = await self._read(there.read_bytes)
                manifest = joined(manifest, await self._read(unpacked, base))
                await put(mesh, self._bulk, base, f"the manifest of the base of {name}")
            about = self._data, model_config(self._data), manifest, directory
            model = await self._read(Rebuilding, *about)
            for digest in model.chunks:
                chunk = await self._read(model.content, digest)
                if await run(digest_of, chunk, deadline_s=SAVE_S) != digest:
                    raise error
                await put(mesh, self._bulk, chunk, f"chunk {digest} of {name}")
        if await put(mesh, self._bulk, content, f"the manifest of {name}") != checkpoint.weights:
            raise error
        path = _place(error, Path(checkpoint.weights))
        then = f"written again from {self._directory / name}"
        await self._tell(self._told("weights", path, error, then))

    async def _read(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What reads the model of a checkpoint; Damaged where that is none of its job."""
        try:
            call = partial(read, *args, **kwargs)
            return await self._mesh.host.run_blocking(call, deadline_s=SAVE_S)
        except (ConfigError, BadMessage, OSError) as error:
            where = error.where if isinstance(error, MeshError) else str(error.filename or "")
            why = f"the model of a checkpoint cannot be read: {error}"
            raise Damaged(why, where=where) from error

    def _told(self, kind: str, path: Path, error: MeshError, then: str) -> dict[str, Any]:
        self._mesh.telemetry.log.error("damaged", path=str(path), why=error.message, then=then)
        return damage.fields(kind, path, error.message, then, job=self._data.id)

    async def _tell(self, told: dict[str, Any], op: str = "") -> None:
        state, op = self._mesh.state, op or uuid.uuid4().hex
        await patiently(self._mesh.clock, lambda: events.append(state, damage.EVENT, told, op))


def _place(error: MeshError | None, otherwise: Path) -> Path:
    """The file that an error names, which has come from another process with that one's address."""
    named = error is not None and error.where.startswith("/")
    return Path(error.where) if error is not None and named else otherwise


class Rebuilding:
    """The contents of a version's chunks, made again from a checkpoint's model. It blocks."""

    def __init__(
        self, data: JobData, config: ModelConfig, manifest: Manifest, directory: Path
    ) -> None:
        """`directory`: of the version's checkpoint. ConfigError when it cannot be read."""
        self.chunks = by_chunk(manifest.tensors)
        like = {
            piece.name: torch.empty(piece.shape, dtype=DTYPES[piece.dtype], device="meta")
            for piece in manifest.tensors
            if is_adapter(piece.name)
        }
        self._adapters = load_adapter(directory / ADAPTER, config, like) if like else {}
        model = directory
        if like:  # beside the merged model, unless it is what the job was given
            own = directory / BASE
            model = own if own.is_dir() else data.bundle / data.config.model.path
        self._stored = StoredRows(model, config)

    def content(self, digest: str) -> memoryview:
        """What that chunk of the manifest should hold; another digest: it does not."""
        pieces = self.chunks[digest]
        found = torch.empty(max(p.offset + p.size for p in pieces), dtype=torch.uint8)
        for piece in pieces:
            dtype, shape = DTYPES[piece.dtype], torch.Size(piece.shape)
            if piece.name in self._adapters:
                flat = self._adapters[piece.name].to(dtype).reshape(-1)
                flat = flat[piece.begin : piece.end].contiguous()
            else:
                width = max(1, math.prod(shape[1:]))  # of a row
                first, last = piece.begin // width, -(-piece.end // width)
                rows = torch.empty(last - first, *shape[1:], dtype=dtype)
                self._stored.fill(piece.name, shape, first, rows)
                flat = rows.reshape(-1)[piece.begin - first * width : piece.end - first * width]
            found[piece.offset : piece.offset + piece.size].copy_(flat.view(torch.uint8))
        return found.numpy().data
