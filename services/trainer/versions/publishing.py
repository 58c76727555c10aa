"""Publishes weight versions to the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from meshrl.common.api.transfer.deltas import VersionRef
from meshrl.common.api.weights import STORE_NAME, Manifest, ManifestRequest, Weights
from meshrl.common.api.weights import TensorPiece as Piece
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import CorruptData, NotFound, Refused
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.common.model.files.tensor_source import BATCH_BYTES
from meshrl.common.model.network.lora import is_adapter_tensor
from meshrl.common.state.pool.demand.requirements import explain_no_hybrids
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.delta.sender import DeltaSender
from meshrl.common.weights.layout.chunk_builder import StagedRows, make_staging_options, plan_copies
from meshrl.common.weights.layout.manifest import (
    encode_manifest,
    get_element_bytes,
    group_by_chunk,
    group_by_tensor,
)
from meshrl.common.weights.staging import StagedVersion, build_version, stage_manifest
from meshrl.common.weights.store.weight_store_client import fetch_chunk, put_chunk
from meshrl.services.trainer.gang.gang_compute import GangCompute

SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # safetensors' names of `rollout.dtype`
DTYPE_NAMES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
MASTER_DTYPE = "F32"
MAX_MANIFESTS = 2  # manifests: a step's next version is staged before it is the current one
HASH_TIMEOUT_S = 600.0  # for a chunk, on a host that does much else
ANSWER_TIMEOUT_S = 240.0  # until who asked hears that it goes on; below the deadline of that call


@dataclass(frozen=True)
class VersionIdentity:
    """A version: its manifest's digest, and what depends on neither ranks nor chunks."""

    manifest: str
    published_identity: str = ""
    masters_identity: str = ""


NO_VERSION = VersionIdentity("")


class VersionPublisher:
    """Writes versions to the store; where adapters learn, only these after version 0."""

    def __init__(self, mesh: Mesh, data: JobData, compute: GangCompute) -> None:
        self._mesh, self._data, self._compute = mesh, data, compute
        self._bulk = BulkClient(mesh)
        self._deltas = DeltaSender(mesh, self._bulk, data.id, data.config.training)
        self._dtype = SAFETENSORS_DTYPES[data.config.rollout.dtype]
        self._dtypes: frozenset[str] = frozenset()  # of the current version, with its base
        self._base_dtypes: tuple[str, frozenset[str]] = "", frozenset()  # of one, by its manifest
        # Of the versions that were made last, or are gone on from: the store may lose them.
        self._recent_manifests: dict[str, Manifest] = {}
        self._stage_lock = asyncio.Lock()  # a core's processes stage one version at a time
        self._restage_tasks: dict[
            str, asyncio.Task[bool]
        ] = {}  # what is written again, by its manifest

    @property
    def has_narrow_dtypes(self) -> bool:
        """Whether less is published than is trained, or was of a base, so that checkpoints must."""
        return bool({self._dtype, *self._dtypes} - {MASTER_DTYPE})

    @property
    def hybrid_rejection(self) -> str:
        """Why nobody but the core can compute gradients; empty: others can with this version."""
        return explain_no_hybrids(self.published_dtypes, self._data.config.training.dtype)

    @property
    def published_dtypes(self) -> list[str]:
        """The types that helpers would need: of this version, its base, and the next one."""
        return sorted({DTYPE_NAMES.get(name, name) for name in (self._dtype, *self._dtypes)})

    def stats(self) -> dict[str, str]:
        return self._deltas.stats()

    async def stop(self) -> None:
        await self._deltas.stop()
        running = list(self._restage_tasks.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def load_version(self, manifest: str) -> None:
        """Learns what the current version is stored as, which another start may have staged."""
        try:
            self._dtypes = await self._read_dtypes(manifest)
            self._remember(manifest, await self._fetch_manifest(manifest))
        except (
            NotFound,
            CorruptData,
        ) as error:  # the next one says, and who needs this gets no answer
            self._mesh.telemetry.log.warning("types of the version", error=str(error))

    async def _read_dtypes(self, manifest: str, *, model: bool = False) -> frozenset[str]:
        """Of all tensors of a version and its base; of those of its `model` alone."""
        every = (await self._fetch_manifest(manifest, alone=False)).tensors
        return frozenset(one.dtype for one in every if not (model and is_adapter_tensor(one.name)))

    async def stage_version(
        self, lineage: int, version: int, previous_manifest: str
    ) -> StagedVersion:
        """Make a version durable; `before`: digest of another one of the same base, or empty."""
        staged = await self.write_version(lineage, version, previous_manifest)
        await stage_manifest(self._mesh, staged)
        await self._deltas.start(VersionRef(lineage, version, staged.digest))
        return staged

    async def write_version(
        self, lineage: int, version: int, previous_manifest: str
    ) -> StagedVersion:
        """The same, before the store is told to keep it."""
        lora = self._data.config.lora
        base: VersionRef | None = None  # what adapters are added to
        if previous_manifest and lora.rank:
            found = await self._fetch_manifest(previous_manifest)
            base = found.base or VersionRef(found.lineage, found.version, previous_manifest)
        outline = self._select_tensors(base is not None)
        laid = await self._stage_rows(outline, version)
        scale = lora.scale if base else 0.0
        made = build_version(self._data.id, lineage, version, outline, laid, base, scale)
        types = frozenset(one.dtype for one in made.manifest.tensors)
        if base is not None:  # the same for many versions
            if self._base_dtypes[0] != base.digest:
                self._base_dtypes = base.digest, await self._read_dtypes(base.digest, model=True)
            types |= self._base_dtypes[1]
        self._dtypes = types
        self._remember(made.digest, made.manifest)
        return made

    def _remember(self, digest: str, manifest: Manifest) -> None:
        self._recent_manifests.pop(digest, None)
        self._recent_manifests[digest] = manifest
        while len(self._recent_manifests) > MAX_MANIFESTS:
            del self._recent_manifests[next(iter(self._recent_manifests))]

    def _select_tensors(self, adapters: bool) -> dict[str, Tensor]:
        """What a version has of its own: all, or adapters alone."""
        every = self._compute.meta_tensors.items()
        return {name: tensor for name, tensor in every if is_adapter_tensor(name) or not adapters}

    async def _stage_rows(
        self, meta_tensors: Mapping[str, Tensor], version: int, *, write: bool = True
    ) -> list[StagedRows]:
        """Where each process of the core has its rows of these; without `write`, would have."""
        how = make_staging_options(self._compute.meta_tensors, self._dtype, write_chunks=write)
        async with self._stage_lock:
            staging = self._compute.create_staging(how, f"storing weights of version {version}")
            try:
                for names, part, parts in plan_copies(meta_tensors, BATCH_BYTES):
                    await staging.copy(names, part, parts)
                    await staging.wait_until_written()
                return await staging.finish()
            finally:
                await staging.close()

    async def _fetch_manifest(self, digest: str, *, alone: bool = True) -> Manifest:
        store, asked = self._mesh.ref(STORE_NAME), ManifestRequest(digest, without_base=alone)
        return await retry(self._mesh.clock, lambda: store.call(Weights.fetch_manifest, asked))

    async def restage_version(self, lineage: int, version: int, manifest: str) -> bool:
        """Writes a version that the store has not whole any more, with the base of its adapters, in
        the chunks that its manifest says; False when these are not its weights, or do not stay so
        meanwhile.
        """
        try:
            lost = await self._fetch_manifest(manifest)
        except (
            NotFound,
            CorruptData,
        ):  # it was of a whole version, or of what nobody knows any more
            nothing = Manifest(self._data.id, lineage, version, [])
            lost = self._recent_manifests.get(manifest, nothing)
        outline, every = self._select_tensors(lost.base is not None), self._select_tensors(False)
        about = self._data.id, lineage, version, outline
        for write in (False, True):
            laid = await self._stage_rows(every, version, write=write)
            again = build_version(*about, laid, lost.base, lost.scale)
            same = bool(lost.image) and again.manifest.image == lost.image  # however they are cut
            if again.digest != manifest and not (same and not any(p.dim for p in lost.tensors)):
                return False
        if again.digest != manifest:
            again = replace(again, manifest=lost, digest=compute_digest(encode_manifest(lost)))
            if again.digest != manifest or not await self._rechunk(lost, laid):
                return False
        try:
            await stage_manifest(self._mesh, again)
        except Refused:  # others have cut its base otherwise, and the store lacks some of that
            return False
        return True

    async def _rechunk(self, lost_manifest: Manifest, staged_rows: Iterable[StagedRows]) -> bool:
        """Writes the chunks that a version has by its manifest, of those that were staged just now
        and are cut otherwise. False where the weights have changed.
        """
        there = [piece for one in staged_rows for piece in one.pieces]
        about = self._mesh, self._bulk
        read = partial(fetch_chunk, *about, wait_reason="weights", job=self._data.id)
        async for digest, content in rechunk_tensors(lost_manifest.tensors, there, read):
            found = await self._mesh.host.run_blocking(
                compute_digest, content, deadline_s=HASH_TIMEOUT_S
            )
            if found != digest:
                return False
            await put_chunk(*about, content, f"chunk {digest} of version {lost_manifest.version}")
        return True

    async def join_restaging(
        self, lineage: int, version: int, manifest: str, fallback: Callable[[], Awaitable[bool]]
    ) -> bool | None:
        """What `stage_again` returns, or where that cannot be done what `otherwise` does; None
        while it goes on: ask again.

        It goes on when who asked is gone, because a gang that is cut off within a piece is lost.
        Who asks meanwhile joins it.
        """
        if (task := self._restage_tasks.get(manifest)) is None:

            async def written() -> bool:
                return await self.restage_version(lineage, version, manifest) or await fallback()

            task = asyncio.create_task(written(), name="write a version again")
            self._restage_tasks[manifest] = task
            task.add_done_callback(consume_exception)
            task.add_done_callback(lambda _: self._restage_tasks.pop(manifest))
        await asyncio.wait([task], timeout=ANSWER_TIMEOUT_S)
        return task.result() if task.done() else None


async def rechunk_tensors(
    target_pieces: Iterable[Piece],
    staged_pieces: Iterable[Piece],
    read_chunk: Callable[[str], Awaitable[bytes]],
) -> AsyncIterator[tuple[str, memoryview]]:
    """Each chunk of the pieces that are `wanted`, by its digest, with what it should hold; another
    digest: the elements are others. Errors as of `read`.

    `there`: pieces of the same tensors, of the same types, which are cut along the same dimension.
    `read`: the bytes of a chunk in which some lie.
    """
    cut, last = group_by_tensor(staged_pieces), ("", b"")  # neighbours mostly lie in the same chunk
    for digest, pieces in group_by_chunk(target_pieces).items():
        found = np.empty(max(piece.offset + piece.size for piece in pieces), np.uint8)
        for piece in pieces:
            into, item = found[piece.offset : piece.offset + piece.size], get_element_bytes(piece)
            for one in cut[piece.name]:
                begin, end = max(one.begin, piece.begin), min(one.end, piece.end)
                if begin >= end:
                    continue
                if last[0] != one.chunk:
                    last = one.chunk, await read_chunk(one.chunk)
                low = one.offset + (begin - one.begin) * item
                content = np.frombuffer(last[1], np.uint8)[low : low + (end - begin) * item]
                into[(begin - piece.begin) * item : (end - piece.begin) * item] = content
        yield digest, found.data
