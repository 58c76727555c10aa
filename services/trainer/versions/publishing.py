"""Publishes weight versions to the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from meshrl.common.api.transfer.deltas import Base
from meshrl.common.api.weights import STORE, Fetch, Manifest, Weights
from meshrl.common.api.weights import Tensor as Piece
from meshrl.common.base.digest import digest_of
from meshrl.common.base.errors import Damaged, NotFound, Refused
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.mesh.runtime.serial_executor import looked_at
from meshrl.common.model.files.source import BATCH_BYTES
from meshrl.common.model.network.lora import is_adapter
from meshrl.common.state.pool.demand.needs import unhelped
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.delta.sending import DeltaSender
from meshrl.common.weights.layout.laying import Laid, laying, slices
from meshrl.common.weights.layout.manifest import by_chunk, by_tensor, itemsize, packed
from meshrl.common.weights.staging import StagedVersion, assembled, keep
from meshrl.common.weights.store.weight_store import get, put
from meshrl.services.trainer.gang.compute import Compute

PUBLISHED = {"float32": "F32", "bfloat16": "BF16"}  # safetensors' names of `rollout.dtype`
TYPES = {name: dtype for dtype, name in PUBLISHED.items()}
MASTERS = "F32"
REMEMBERED = 2  # manifests: a step's next version is staged before it is the current one
HASH_S = 600.0  # for a chunk, on a host that does much else
ANSWER_S = 240.0  # until who asked hears that it goes on; below the deadline of that call


@dataclass(frozen=True)
class VersionIdentity:
    """A version: its manifest's digest, and what depends on neither ranks nor chunks."""

    manifest: str
    image: str = ""
    masters: str = ""


NOBODY = VersionIdentity("")


class Publisher:
    """Writes versions to the store; where adapters learn, only these after version 0."""

    def __init__(self, mesh: Mesh, data: JobData, compute: Compute) -> None:
        self._mesh, self._data, self._compute = mesh, data, compute
        self._bulk = BulkClient(mesh)
        self._deltas = DeltaSender(mesh, self._bulk, data.id, data.config.training)
        self._dtype = PUBLISHED[data.config.rollout.dtype]
        self._types: frozenset[str] = frozenset()  # of the current version, with its base
        self._base_types: tuple[str, frozenset[str]] = "", frozenset()  # of one, by its manifest
        # Of the versions that were made last, or are gone on from: the store may lose them.
        self._made: dict[str, Manifest] = {}
        self._one = asyncio.Lock()  # a core's processes stage one version at a time
        self._again: dict[str, asyncio.Task[bool]] = {}  # what is written again, by its manifest

    @property
    def narrow(self) -> bool:
        """Whether less is published than is trained, or was of a base, so that checkpoints must."""
        return bool({self._dtype, *self._types} - {MASTERS})

    @property
    def unhelped(self) -> str:
        """Why nobody but the core can compute gradients; empty: others can with this version."""
        return unhelped(self.published, self._data.config.training.dtype)

    @property
    def published(self) -> list[str]:
        """The types that helpers would need: of this version, its base, and the next one."""
        return sorted({TYPES.get(name, name) for name in (self._dtype, *self._types)})

    def stats(self) -> dict[str, str]:
        return self._deltas.stats()

    async def stop(self) -> None:
        await self._deltas.stop()
        running = list(self._again.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def look(self, manifest: str) -> None:
        """Learns what the current version is stored as, which another start may have staged."""
        try:
            self._types = await self._types_of(manifest)
            self._remember(manifest, await self._manifest(manifest))
        except (NotFound, Damaged) as error:  # the next one says, and who needs this gets no answer
            self._mesh.telemetry.log.warning("types of the version", error=str(error))

    async def _types_of(self, manifest: str, *, model: bool = False) -> frozenset[str]:
        """Of all tensors of a version and its base; of those of its `model` alone."""
        every = (await self._manifest(manifest, alone=False)).tensors
        return frozenset(one.dtype for one in every if not (model and is_adapter(one.name)))

    async def stage(self, lineage: int, version: int, before: str) -> StagedVersion:
        """Make a version durable; `before`: digest of another one of the same base, or empty."""
        staged = await self.laid(lineage, version, before)
        await keep(self._mesh, staged)
        await self._deltas.begin(Base(lineage, version, staged.digest))
        return staged

    async def laid(self, lineage: int, version: int, before: str) -> StagedVersion:
        """The same, before the store is told to keep it."""
        lora = self._data.config.lora
        base: Base | None = None  # what adapters are added to
        if before and lora.rank:
            found = await self._manifest(before)
            base = found.base or Base(found.lineage, found.version, before)
        outline = self._scope(base is not None)
        laid = await self._staged(outline, version)
        scale = lora.scale if base else 0.0
        made = assembled(self._data.id, lineage, version, outline, laid, base, scale)
        types = frozenset(one.dtype for one in made.manifest.tensors)
        if base is not None:  # the same for many versions
            if self._base_types[0] != base.digest:
                self._base_types = base.digest, await self._types_of(base.digest, model=True)
            types |= self._base_types[1]
        self._types = types
        self._remember(made.digest, made.manifest)
        return made

    def _remember(self, digest: str, manifest: Manifest) -> None:
        self._made.pop(digest, None)
        self._made[digest] = manifest
        while len(self._made) > REMEMBERED:
            del self._made[next(iter(self._made))]

    def _scope(self, adapters: bool) -> dict[str, Tensor]:
        """What a version has of its own: all, or adapters alone."""
        every = self._compute.outline.items()
        return {name: tensor for name, tensor in every if is_adapter(name) or not adapters}

    async def _staged(
        self, outline: Mapping[str, Tensor], version: int, *, write: bool = True
    ) -> list[Laid]:
        """Where each process of the core has its rows of these; without `write`, would have."""
        how = laying(self._compute.outline, self._dtype, write=write)
        async with self._one:
            staging = self._compute.staging(how, f"storing weights of version {version}")
            try:
                for names, part, parts in slices(outline, BATCH_BYTES):
                    await staging.copy(names, part, parts)
                    await staging.settled()
                return await staging.end()
            finally:
                await staging.close()

    async def _manifest(self, digest: str, *, alone: bool = True) -> Manifest:
        store, asked = self._mesh.ref(STORE), Fetch(digest, alone=alone)
        return await patiently(self._mesh.clock, lambda: store.call(Weights.manifest, asked))

    async def stage_again(self, lineage: int, version: int, manifest: str) -> bool:
        """Writes a version that the store has not whole any more, with the base of its adapters, in
        the chunks that its manifest says; False when these are not its weights, or do not stay so
        meanwhile.
        """
        try:
            lost = await self._manifest(manifest)
        except (NotFound, Damaged):  # it was of a whole version, or of what nobody knows any more
            nothing = Manifest(self._data.id, lineage, version, [])
            lost = self._made.get(manifest, nothing)
        outline, every = self._scope(lost.base is not None), self._scope(False)
        about = self._data.id, lineage, version, outline
        for write in (False, True):
            laid = await self._staged(every, version, write=write)
            again = assembled(*about, laid, lost.base, lost.scale)
            same = bool(lost.image) and again.manifest.image == lost.image  # however they are cut
            if again.digest != manifest and not (same and not any(p.dim for p in lost.tensors)):
                return False
        if again.digest != manifest:
            again = replace(again, manifest=lost, digest=digest_of(packed(lost)))
            if again.digest != manifest or not await self._recut(lost, laid):
                return False
        try:
            await keep(self._mesh, again)
        except Refused:  # others have cut its base otherwise, and the store lacks some of that
            return False
        return True

    async def _recut(self, lost: Manifest, laid: Iterable[Laid]) -> bool:
        """Writes the chunks that a version has by its manifest, of those that were staged just now
        and are cut otherwise. False where the weights have changed.
        """
        there = [piece for one in laid for piece in one.pieces]
        about = self._mesh, self._bulk
        read = partial(get, *about, what="weights", job=self._data.id)
        async for digest, content in recut(lost.tensors, there, read):
            found = await self._mesh.host.run_blocking(digest_of, content, deadline_s=HASH_S)
            if found != digest:
                return False
            await put(*about, content, f"chunk {digest} of version {lost.version}")
        return True

    async def joined_staging(
        self, lineage: int, version: int, manifest: str, otherwise: Callable[[], Awaitable[bool]]
    ) -> bool | None:
        """What `stage_again` returns, or where that cannot be done what `otherwise` does; None
        while it goes on: ask again.

        It goes on when who asked is gone, because a gang that is cut off within a piece is lost.
        Who asks meanwhile joins it.
        """
        if (task := self._again.get(manifest)) is None:

            async def written() -> bool:
                return await self.stage_again(lineage, version, manifest) or await otherwise()

            task = asyncio.create_task(written(), name="write a version again")
            self._again[manifest] = task
            task.add_done_callback(looked_at)
            task.add_done_callback(lambda _: self._again.pop(manifest))
        await asyncio.wait([task], timeout=ANSWER_S)
        return task.result() if task.done() else None


async def recut(
    wanted: Iterable[Piece], there: Iterable[Piece], read: Callable[[str], Awaitable[bytes]]
) -> AsyncIterator[tuple[str, memoryview]]:
    """Each chunk of the pieces that are `wanted`, by its digest, with what it should hold; another
    digest: the elements are others. Errors as of `read`.

    `there`: pieces of the same tensors, of the same types, which are cut along the same dimension.
    `read`: the bytes of a chunk in which some lie.
    """
    cut, last = by_tensor(there), ("", b"")  # neighbours mostly lie in the same chunk
    for digest, pieces in by_chunk(wanted).items():
        found = np.empty(max(piece.offset + piece.size for piece in pieces), np.uint8)
        for piece in pieces:
            into, item = found[piece.offset : piece.offset + piece.size], itemsize(piece)
            for one in cut[piece.name]:
                begin, end = max(one.begin, piece.begin), min(one.end, piece.end)
                if begin >= end:
                    continue
                if last[0] != one.chunk:
                    last = one.chunk, await read(one.chunk)
                low = one.offset + (begin - one.begin) * item
                content = np.frombuffer(last[1], np.uint8)[low : low + (end - begin) * item]
                into[(begin - piece.begin) * item : (end - piece.begin) * item] = content
        yield digest, found.data
