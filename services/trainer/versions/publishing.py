"""Publisher of weight versions to the store."""

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
HASH_TIMEOUT_S = 600.0  # for a chunk, on a loaded host
ANSWER_TIMEOUT_S = 240.0  # until an `in_progress` answer; below the call's deadline


@dataclass(frozen=True)
class VersionIdentity:
    """Identity of a version: its manifest's digest, and digests independent of ranks and chunks."""

    manifest: str
    published_identity: str = ""
    masters_identity: str = ""


NO_VERSION = VersionIdentity("")


class VersionPublisher:
    """Writer of versions to the store; with adapters, versions after 0 hold these alone."""

    def __init__(self, mesh: Mesh, data: JobData, compute: GangCompute) -> None:
        self._mesh, self._data, self._compute = mesh, data, compute
        self._bulk = BulkClient(mesh)
        self._deltas = DeltaSender(mesh, self._bulk, data.id, data.config.training)
        self._dtype = SAFETENSORS_DTYPES[data.config.rollout.dtype]
        self._dtypes: frozenset[str] = frozenset()  # of the current version and its base
        self._base_dtypes: tuple[str, frozenset[str]] = "", frozenset()  # of a base, by manifest
        # Of the newest versions and of those resumed from: the store may lose them.
        self._recent_manifests: dict[str, Manifest] = {}
        self._stage_lock = asyncio.Lock()  # processes of a core stage one version at a time
        self._restage_tasks: dict[str, asyncio.Task[bool]] = {}  # by manifest

    @property
    def has_narrow_dtypes(self) -> bool:
        """True if tensors are published in a narrower type than they are trained in, or the base's
        were. Checkpoints must then hold the float32 masters.
        """
        return bool({self._dtype, *self._dtypes} - {MASTER_DTYPE})

    @property
    def hybrid_rejection(self) -> str:
        """Reason that only the core can compute gradients; empty if hybrids can, too."""
        return explain_no_hybrids(self.published_dtypes, self._data.config.training.dtype)

    @property
    def published_dtypes(self) -> list[str]:
        """Names of the dtypes that hybrids need: of this version, its base and the next version."""
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
        """Read the dtypes of the current version, which an earlier process may have staged."""
        try:
            self._dtypes = await self._read_dtypes(manifest)
            self._remember(manifest, await self._fetch_manifest(manifest))
        except (NotFound, CorruptData) as error:
            # The next version has them; until then, callers get no answer.
            self._mesh.telemetry.log.warning(
                "the dtypes of the version cannot be read", error=str(error)
            )

    async def _read_dtypes(self, manifest: str, *, model: bool = False) -> frozenset[str]:
        """Return the dtypes of all tensors of a version and its base, or of its `model` alone."""
        every = (await self._fetch_manifest(manifest, alone=False)).tensors
        return frozenset(one.dtype for one in every if not (model and is_adapter_tensor(one.name)))

    async def stage_version(
        self, lineage: int, version: int, previous_manifest: str
    ) -> StagedVersion:
        """Make a version durable and register it with the store.

        `previous_manifest`: digest of another version with the same base, or empty.
        """
        staged = await self.write_version(lineage, version, previous_manifest)
        await stage_manifest(self._mesh, staged)
        await self._deltas.start(VersionRef(lineage, version, staged.digest))
        return staged

    async def write_version(
        self, lineage: int, version: int, previous_manifest: str
    ) -> StagedVersion:
        """Write a version's chunks, before its manifest is registered with the store."""
        lora = self._data.config.lora
        base: VersionRef | None = None  # the version that adapters are added to
        if previous_manifest and lora.rank:
            found = await self._fetch_manifest(previous_manifest)
            base = found.base or VersionRef(found.lineage, found.version, previous_manifest)
        outline = self._select_tensors(base is not None)
        laid = await self._stage_rows(outline, version)
        scale = lora.scale if base else 0.0
        staged = build_version(self._data.id, lineage, version, outline, laid, base, scale)
        types = frozenset(one.dtype for one in staged.manifest.tensors)
        if base is not None:  # many versions share one base
            if self._base_dtypes[0] != base.manifest:
                self._base_dtypes = (
                    base.manifest,
                    await self._read_dtypes(base.manifest, model=True),
                )
            types |= self._base_dtypes[1]
        self._dtypes = types
        self._remember(staged.digest, staged.manifest)
        return staged

    def _remember(self, digest: str, manifest: Manifest) -> None:
        self._recent_manifests.pop(digest, None)
        self._recent_manifests[digest] = manifest
        while len(self._recent_manifests) > MAX_MANIFESTS:
            del self._recent_manifests[next(iter(self._recent_manifests))]

    def _select_tensors(self, adapters: bool) -> dict[str, Tensor]:
        """Return the meta tensors that a version stores itself: all, or adapters alone."""
        every = self._compute.meta_tensors.items()
        return {name: tensor for name, tensor in every if is_adapter_tensor(name) or not adapters}

    async def _stage_rows(
        self, meta_tensors: Mapping[str, Tensor], version: int, *, write: bool = True
    ) -> list[StagedRows]:
        """Return each process's rows of these tensors and their chunks; `write` stores the
        chunks.
        """
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
        store, request = self._mesh.ref(STORE_NAME), ManifestRequest(digest, without_base=alone)
        return await retry(self._mesh.clock, lambda: store.call(Weights.fetch_manifest, request))

    async def restage_version(self, lineage: int, version: int, manifest: str) -> bool:
        """Write an incomplete version again, with the base of its adapters, in its manifest's
        chunks.

        Return False if the current weights are not this version, or change before the end.
        """
        try:
            lost = await self._fetch_manifest(manifest)
        except (NotFound, CorruptData):
            # It was the manifest of a full version, or is unknown.
            nothing = Manifest(self._data.id, lineage, version, [])
            lost = self._recent_manifests.get(manifest, nothing)
        outline, every = self._select_tensors(lost.base is not None), self._select_tensors(False)
        about = self._data.id, lineage, version, outline
        for write in (False, True):
            laid = await self._stage_rows(every, version, write=write)
            again = build_version(*about, laid, lost.base, lost.scale)
            # Equal weights may have another chunk layout.
            same = bool(lost.image) and again.manifest.image == lost.image
            if again.digest != manifest and not (same and not any(p.dim for p in lost.tensors)):
                return False
        if again.digest != manifest:
            again = replace(again, manifest=lost, digest=compute_digest(encode_manifest(lost)))
            if again.digest != manifest or not await self._rechunk(lost, laid):
                return False
        try:
            await stage_manifest(self._mesh, again)
        except Refused:  # its base had another chunk layout, and the store lacks some of it
            return False
        return True

    async def _rechunk(self, lost_manifest: Manifest, staged_rows: Iterable[StagedRows]) -> bool:
        """Write a version's chunks from rows of another layout; False if the weights differ."""
        staged_pieces = [piece for one in staged_rows for piece in one.pieces]
        about = self._mesh, self._bulk
        read = partial(fetch_chunk, *about, wait_reason="weights", job=self._data.id)
        async for digest, content in rechunk_tensors(lost_manifest.tensors, staged_pieces, read):
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
        """Return the result of `restage_version`, or of `fallback` if it cannot; None while in
        progress.

        The task continues after its caller has gone, because a gang that is interrupted within a
        piece is lost. Later callers for the same manifest share the task.
        """
        if (task := self._restage_tasks.get(manifest)) is None:

            async def written() -> bool:
                return await self.restage_version(lineage, version, manifest) or await fallback()

            task = asyncio.create_task(written(), name="restage a version")
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
    """Yield each chunk of `target_pieces`: its digest, and the content computed for it.

    A content with another digest means that the elements differ. Errors are those of `read_chunk`.

    Args:
        target_pieces: Pieces of the chunks to build.
        staged_pieces: Pieces of the same tensors and dtypes, split along the same dimension.
        read_chunk: Returns the bytes of a chunk that holds staged pieces.
    """
    cut, last = group_by_tensor(staged_pieces), ("", b"")  # neighbours mostly share a chunk
    for digest, pieces in group_by_chunk(target_pieces).items():
        found = np.empty(max(piece.offset + piece.size_bytes for piece in pieces), np.uint8)
        for piece in pieces:
            into, item = (
                found[piece.offset : piece.offset + piece.size_bytes],
                get_element_bytes(piece),
            )
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
