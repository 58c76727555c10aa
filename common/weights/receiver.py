"""Receiver of weight versions: fetches a version's missing chunks and opens its image.

On the store's host the chunk files are those of the store, elsewhere those of the host's cache. The
process that stores a file hashes it once for all processes of a host
(`meshrl.common.weights.chunks.verified_files`). A file without a valid record is hashed by the
first process that maps it, while the others continue with other files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile

import torch

from meshrl.common.api.weights import (
    STORE_NAME,
    ChunkVerification,
    Manifest,
    ManifestRequest,
    Weights,
)
from meshrl.common.base.errors import CorruptData, MeshError, NotFound, StorageFull
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.model.files.tensor_source import TensorSource
from meshrl.common.weights.bulk.port import BulkClient, ChunkStore
from meshrl.common.weights.chunks.chunk_store import try_lock
from meshrl.common.weights.delta.receiver import acknowledge_version
from meshrl.common.weights.layout.manifest import RowRange, check_manifest
from meshrl.common.weights.layout.version_image import VersionImage
from meshrl.common.weights.store import chunk_cache
from meshrl.common.weights.store.chunk_cache import VersionToFetch
from meshrl.common.weights.store.weight_store_client import fetch_chunk, look_up_store
from meshrl.common.weights.transports.version_fetcher import PullTransport, VersionFetcher

HASH_BATCH_BYTES = 256 << 20  # of chunks hashed in one blocking call
HASH_TIMEOUT_S = 120.0  # for one such call on a slow disk
COPY_TIMEOUT_S = 600.0  # to assemble tensors from a slow disk
POLL_S = 0.005  # between checks whether other processes have finished hashing
PEER_STALL_S = 2.0  # without progress of theirs: a process that hashes is stopped or hangs


class WeightReceiver:
    """Receiver of versions, one after the other, for one process."""

    def __init__(
        self,
        mesh: Mesh,
        bulk: BulkClient,
        version_fetcher: VersionFetcher | None = None,
        *,
        wants_deltas: bool = False,
    ) -> None:
        """Create the receiver.

        Args:
            version_fetcher: Fetcher of a process that can use several transports.
            wants_deltas: This process receives successive versions, so deltas for its host are
                useful.
        """
        self._mesh, self._bulk, self._wants_deltas = mesh, bulk, wants_deltas
        self._version_fetcher = version_fetcher or VersionFetcher(mesh, [PullTransport(mesh, bulk)])
        self._is_cache_full = False  # this host has no space for the last version
        self._has_warned_full = False
        self._has_version = False  # a version was received

    async def receive(
        self,
        digest: str,
        selection: Mapping[str, RowRange | None] | None = None,
        *,
        rehash: bool = False,
    ) -> VersionImage:
        """Return the image of a complete and verified version, or of a selection of its tensors.

        Args:
            digest: Digest of the manifest.
            selection: Rows by tensor name, None for all rows; without it, the whole version.
            rehash: Hash verified files again, and drop their pages from this process's memory
                afterwards.
        Raises:
            NotFound: The store does not have a chunk.
            CorruptData: A chunk in the store is corrupt.

        Errors are raised after all chunks were requested, so that all missing ones are made again
        at once.
        """
        image = VersionImage(await self.fetch_manifest(digest), digest, selection)
        await self._fill_image(image, rehash)
        self._has_version = True
        return image

    async def open_tensor_source(self, digest: str) -> TensorSource:
        """Open a version, hashed again, whose tensors are loaded a few at a time.

        Only the requested tensors are in this process's memory. It raises the errors of `receive`.
        """
        image = await self.receive(digest, rehash=True)

        async def some(names: Sequence[str]) -> dict[str, torch.Tensor]:
            return await self._mesh.host.run_blocking(
                image.load_tensors, names, deadline_s=COPY_TIMEOUT_S
            )

        return TensorSource(image.meta_tensors, some)

    async def fetch_manifest(self, digest: str) -> Manifest:
        """Return a version's manifest from the store. NotFound, CorruptData."""
        ref, request = self._mesh.ref(STORE_NAME), ManifestRequest(digest)
        found = await retry(self._mesh.clock, lambda: ref.call(Weights.fetch_manifest, request))
        return check_manifest(found)

    async def _fill_image(self, image: VersionImage, rehash: bool) -> None:
        mesh = self._mesh

        async def files() -> ChunkStore | None:
            return await self._bulk.open_local_store(await look_up_store(mesh))

        with mesh.wait("weights", on=STORE_NAME):
            stored = await retry(mesh.clock, files)
        if stored is not None:
            lacking = await self._map_chunks(image, stored, image.chunk_sizes, rehash)
            for digest, error in lacking.items():
                if isinstance(error, CorruptData):  # the store quarantines its file and reports it
                    verification = ChunkVerification(digest, "weights", image.manifest.job)
                    await retry(
                        mesh.clock,
                        partial(mesh.ref(STORE_NAME).call, Weights.verify_chunk, verification),
                    )
        else:
            lacking = await self._fetch_and_map(image, rehash)
        if lacking:
            raise next(iter(lacking.values()))

    async def _fetch_and_map(self, image: VersionImage, rehash: bool) -> dict[str, MeshError]:
        """Map the chunks this host has and fetch the others; return the errors of the rest."""
        cache, lacking = chunk_cache.open_cache(self._mesh), list(image.chunk_sizes)
        if cache is not None:  # concurrent evictions then choose other chunks
            await self._mesh.host.run_blocking(
                _mark_used, cache, lacking, deadline_s=HASH_TIMEOUT_S
            )
            lacking = await self._map_cached(image, cache, lacking, rehash)
            if lacking:
                lacking = await self._fetch_to_cache(image, cache, lacking, rehash)
        failed: dict[str, MeshError] = {}
        for digest in lacking:
            try:
                about, job = (self._mesh, self._bulk, digest, "weights"), image.manifest.job
                content = await fetch_chunk(*about, job=job, needed_chunks=image.chunk_sizes.keys())
            except (NotFound, CorruptData) as error:
                failed[digest] = error
                continue
            # A chunk that does not fit is not mapped: removed files take space while they are
            # mapped.
            keeps = None if self._is_cache_full else cache
            if keeps is None or await self._map_chunks(image, keeps, [digest], rehash):
                run = self._mesh.host.run_blocking
                await run(image.copy_chunk, digest, content, deadline_s=HASH_TIMEOUT_S)
        if cache is not None and not failed:
            await self._mesh.host.run_blocking(
                _mark_used, cache, image.chunk_sizes, deadline_s=HASH_TIMEOUT_S
            )
            chunks = {piece.chunk for piece in image.manifest.tensors if piece.size_bytes}

            def has_all_chunks() -> bool:
                return all(map(cache.has, chunks))

            # Deltas are made from versions that are complete files on this host.
            if self._wants_deltas and await self._mesh.host.run_blocking(
                has_all_chunks, deadline_s=HASH_TIMEOUT_S
            ):
                await acknowledge_version(self._mesh, image.manifest, image.digest)
        return failed

    async def _map_cached(
        self, image: VersionImage, cache: ChunkStore, digests: list[str], rehash: bool
    ) -> list[str]:
        """Map the cached chunks and return the others; corrupt ones are removed."""
        wrong = await self._map_chunks(image, cache, digests, rehash)
        count = self._mesh.telemetry.count
        for digest, error in wrong.items():
            if isinstance(error, CorruptData):
                count("chunks_damaged")
                with suppress(OSError):
                    cache.chunk_path(digest).unlink()
        found = [image.chunk_sizes[digest] for digest in digests if digest not in wrong]
        count("chunks_found", len(found))
        count("chunks_found_bytes", sum(found))
        return list(wrong)

    async def _fetch_to_cache(
        self, image: VersionImage, cache: ChunkStore, digests: list[str], rehash: bool
    ) -> list[str]:
        sizes = {digest: image.chunk_sizes[digest] for digest in digests}
        try:
            version = VersionToFetch(
                image.manifest.job,
                image.digest,
                sizes,
                image.chunk_sizes.keys(),
                is_joining=self._wants_deltas and not self._has_version,
            )
            await self._version_fetcher.fetch(version, cache)
            self._is_cache_full = False
        except StorageFull as error:
            if not self._has_warned_full:
                self._mesh.telemetry.log.warning(
                    "no disk space for weights: each process holds its own copy", error=str(error)
                )
            self._is_cache_full = self._has_warned_full = True
        except MeshError as error:  # each missing chunk raises its own error below
            self._is_cache_full = False
            self._mesh.telemetry.log.info("weights cannot be cached", error=str(error))
        return list(await self._map_chunks(image, cache, digests, rehash))

    async def _map_chunks(
        self, image: VersionImage, chunks: ChunkStore, digests: Iterable[str], rehash: bool
    ) -> dict[str, MeshError]:
        """Map chunks that are valid files here; return the errors of the others."""
        clock, run = self._mesh.clock, self._mesh.host.run_blocking
        look = _ChunkMapper(image, chunks, rehash)
        todo = list(digests)
        self._mesh.random.shuffle(todo)  # processes of a host start at different chunks
        moved_at = clock.monotonic()
        while todo:
            alone = clock.monotonic() - moved_at > PEER_STALL_S
            filled = accumulate(map(image.chunk_sizes.__getitem__, todo))
            some = todo[: sum(1 for _ in takewhile(HASH_BATCH_BYTES.__gt__, filled)) + 1]
            busy = await run(look.map_chunks, some, alone, deadline_s=HASH_TIMEOUT_S)
            todo = todo[len(some) :] + busy
            if len(busy) < len(some):
                moved_at = clock.monotonic()
            elif busy:
                await clock.sleep(POLL_S)
        self._mesh.telemetry.count("chunks_hashed_bytes", look.hashed_bytes)
        return look.errors_by_digest


def _mark_used(cache: ChunkStore, digests: Iterable[str]) -> None:
    for digest in digests:
        with suppress(OSError):
            cache.mark_used(digest)


@dataclass
class _ChunkMapper:
    image: VersionImage
    chunks: ChunkStore
    rehash: bool  # hash chunks again that were verified before
    errors_by_digest: dict[str, MeshError] = field(default_factory=dict)
    hashed_bytes: int = 0

    def map_chunks(self, digests: Iterable[str], ignore_lock: bool) -> list[str]:
        """Map chunks; return those that another process is hashing, none with `ignore_lock`."""
        busy = []
        for digest in digests:
            try:
                if not self._try_map_chunk(digest, ignore_lock):
                    busy.append(digest)
            except (CorruptData, NotFound) as error:
                self.errors_by_digest[digest] = error
        return busy

    def _try_map_chunk(self, digest: str, ignore_lock: bool) -> bool:
        path, fresh = self.chunks.chunk_path(digest), self.rehash
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"no chunk {digest}", where=str(path)) from None
        except OSError as error:
            raise CorruptData(f"a chunk cannot be read: {error}", where=str(path)) from error
        try:
            stat = os.fstat(descriptor)
            self.image.map_chunk(digest, descriptor, str(path))
            if not fresh and self.chunks.is_verified(digest, stat):
                return True
            if not (ignore_lock or fresh) and not try_lock(descriptor):
                return False
            stat = os.fstat(descriptor)  # as the process that had the lock left it
            if not fresh and self.chunks.is_verified(digest, stat):
                return True
            self.hashed_bytes += stat.st_size
            if not self.image.is_valid(digest):
                raise CorruptData("a chunk does not match its digest", where=str(path))
            self.chunks.record_verified(digest, stat)
            if fresh:
                self.image.release_pages(digest)
            return True
        finally:
            os.close(descriptor)  # releases the lock
