"""Receives versions of weights: brings what a host lacks of one, and opens its image there.

On the store's own host the chunk files are the store's; elsewhere those of the host's cache. A file
is hashed once for all processes of a host (`meshrl.common.weights.chunks.verified`), by the one
that stores it. A file of which that is not on record, or not any more, is hashed by the first that
maps it, while the others see to the next ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile

import torch

from meshrl.common.api.weights import STORE, Examine, Fetch, Manifest, Weights
from meshrl.common.base.errors import Damaged, MeshError, NotFound, StorageFull
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.model.files.source import TensorSource
from meshrl.common.weights.bulk.port import BulkClient, ChunkStore
from meshrl.common.weights.chunks.chunks import locked
from meshrl.common.weights.delta.receiving import acknowledge
from meshrl.common.weights.layout.images import Image
from meshrl.common.weights.layout.manifest import Rows, understood
from meshrl.common.weights.store import host_chunks
from meshrl.common.weights.store.host_chunks import WantedVersion
from meshrl.common.weights.store.weight_store import get, store_entry
from meshrl.common.weights.ways.bringing import Bringing, PullPath

BATCH_BYTES = 256 << 20  # of chunks that are hashed in one go off the loop
HASH_S = 120.0  # for these, from a disk that is slow
COPY_S = 600.0  # to put tensors together, from a disk that is slow
LOOK_S = 0.005  # how often one looks whether others are done with what they hash
STANDS_S = 2.0  # without any progress of theirs: who hashes is stopped, or has no end


class Receiver:
    """Receives versions one after the other, for one process."""

    def __init__(
        self,
        mesh: Mesh,
        bulk: BulkClient,
        bringing: Bringing | None = None,
        *,
        follows: bool = False,
    ) -> None:
        """`bringing`: of a process that may have what its host lacks by more ways than one.
        `follows`: it receives one version after the other, so that deltas are worth making for its
        host.
        """
        self._mesh, self._bulk, self._follows = mesh, bulk, follows
        self._bringing = bringing or Bringing(mesh, [PullPath(mesh, bulk)])
        self._full = False  # this host has no room for the version that came last
        self._said = False  # so

    async def receive(
        self, digest: str, wanted: Mapping[str, Rows | None] | None = None, *, fresh: bool = False
    ) -> Image:
        """The image of a version by its manifest's digest, or of what is `wanted` of its tensors,
        once all of it is here and right. Damaged or NotFound when the store does not hold it as it
        was written, once all chunks were asked for: so all are made again at once. `fresh`: what
        this host has found right is hashed again, and is not in this process's memory after that.
        """
        image = Image(await self.manifest(digest), digest, wanted)
        await self._fill(image, fresh)
        return image

    async def source(self, digest: str) -> TensorSource:
        """A version, hashed anew, some tensors at a time: of no more is in this process's memory
        than is asked for at once. Errors as of `receive`.
        """
        image = await self.receive(digest, fresh=True)

        async def some(names: Sequence[str]) -> dict[str, torch.Tensor]:
            return await self._mesh.host.run_blocking(image.gathered, names, deadline_s=COPY_S)

        return TensorSource(image.outline, some)

    async def manifest(self, digest: str) -> Manifest:
        """What the store says of a version; NotFound, Damaged."""
        ref, asked = self._mesh.ref(STORE), Fetch(digest)
        found = await patiently(self._mesh.clock, lambda: ref.call(Weights.manifest, asked))
        return understood(found)

    async def _fill(self, image: Image, fresh: bool) -> None:
        mesh = self._mesh

        async def files() -> ChunkStore | None:
            return await self._bulk.local(await store_entry(mesh))

        with mesh.wait("weights", on=STORE):
            stored = await patiently(mesh.clock, files)
        if stored is not None:
            lacking = await self._mapped(image, stored, image.chunks, fresh)
            for digest, error in lacking.items():
                if isinstance(error, Damaged):  # the store sets its file aside, and tells
                    asked = Examine(digest, "weights", image.manifest.job)
                    await patiently(
                        mesh.clock, partial(mesh.ref(STORE).call, Weights.examine, asked)
                    )
        else:
            lacking = await self._brought(image, fresh)
        if lacking:
            raise next(iter(lacking.values()))

    async def _brought(self, image: Image, fresh: bool) -> dict[str, MeshError]:
        """Maps what this host has, and brings the rest; what the store does not have."""
        cache, lacking = host_chunks.cache(self._mesh), list(image.chunks)
        if cache is not None:  # others that make room meanwhile begin elsewhere
            await self._mesh.host.run_blocking(_used, cache, lacking, deadline_s=HASH_S)
            lacking = await self._kept(image, cache, lacking, fresh)
            if lacking:
                lacking = await self._came(image, cache, lacking, fresh)
        failed: dict[str, MeshError] = {}
        for digest in lacking:
            try:
                about, job = (self._mesh, self._bulk, digest, "weights"), image.manifest.job
                content = await get(*about, job=job, needed=image.chunks.keys())
            except (NotFound, Damaged) as error:
                failed[digest] = error
                continue
            # What does not fit is not mapped: files that are removed take room while they are.
            keeps = None if self._full else cache
            if keeps is None or await self._mapped(image, keeps, [digest], fresh):
                run = self._mesh.host.run_blocking
                await run(image.hold, digest, content, deadline_s=HASH_S)
        if cache is not None and not failed:
            await self._mesh.host.run_blocking(_used, cache, image.chunks, deadline_s=HASH_S)
            chunks = {piece.chunk for piece in image.manifest.tensors if piece.size}

            def whole() -> bool:
                return all(map(cache.has, chunks))

            # Deltas are made of what this host has whole, as files.
            if self._follows and await self._mesh.host.run_blocking(whole, deadline_s=HASH_S):
                await acknowledge(self._mesh, image.manifest, image.digest)
        return failed

    async def _kept(
        self, image: Image, cache: ChunkStore, digests: list[str], fresh: bool
    ) -> list[str]:
        """Maps what the host's cache has of these chunks; the others. What is damaged goes."""
        wrong = await self._mapped(image, cache, digests, fresh)
        count = self._mesh.telemetry.count
        for digest, error in wrong.items():
            if isinstance(error, Damaged):
                count("chunks_damaged")
                with suppress(OSError):
                    cache.path(digest).unlink()
        found = [image.chunks[digest] for digest in digests if digest not in wrong]
        count("chunks_found", len(found))
        count("chunks_found_bytes", sum(found))
        return list(wrong)

    async def _came(
        self, image: Image, cache: ChunkStore, digests: list[str], fresh: bool
    ) -> list[str]:
        sizes = {digest: image.chunks[digest] for digest in digests}
        try:
            version = WantedVersion(image.manifest.job, image.digest, sizes, image.chunks.keys())
            await self._bringing.bring(version, cache)
            self._full = False
        except StorageFull as error:
            if not self._said:
                self._mesh.telemetry.log.warning(
                    "no room for weights: each process holds a copy", error=str(error)
                )
            self._full = self._said = True
        except MeshError as error:  # each chunk that lacks says by itself what is the matter
            self._full = False
            self._mesh.telemetry.log.info("weights are not kept", error=str(error))
        return list(await self._mapped(image, cache, digests, fresh))

    async def _mapped(
        self, image: Image, chunks: ChunkStore, digests: Iterable[str], fresh: bool
    ) -> dict[str, MeshError]:
        """Maps chunks that are files here, once they are right; why the others are not."""
        clock, run = self._mesh.clock, self._mesh.host.run_blocking
        look = _Look(image, chunks, fresh)
        todo = list(digests)
        self._mesh.random.shuffle(todo)  # processes of a host begin at different ones
        moved_at = clock.monotonic()
        while todo:
            alone = clock.monotonic() - moved_at > STANDS_S
            filled = accumulate(map(image.chunks.__getitem__, todo))
            some = todo[: sum(1 for _ in takewhile(BATCH_BYTES.__gt__, filled)) + 1]
            busy = await run(look.take, some, alone, deadline_s=HASH_S)
            todo = todo[len(some) :] + busy
            if len(busy) < len(some):
                moved_at = clock.monotonic()
            elif busy:
                await clock.sleep(LOOK_S)
        self._mesh.telemetry.count("chunks_hashed_bytes", look.hashed_bytes)
        return look.wrong


def _used(cache: ChunkStore, digests: Iterable[str]) -> None:
    for digest in digests:
        with suppress(OSError):
            cache.use(digest)


@dataclass
class _Look:
    image: Image
    chunks: ChunkStore
    fresh: bool  # what was found right before is hashed again
    wrong: dict[str, MeshError] = field(default_factory=dict)
    hashed_bytes: int = 0

    def take(self, digests: Iterable[str], alone: bool) -> list[str]:
        """Those that another process hashes at the moment; none, when it is to be done `alone`."""
        busy = []
        for digest in digests:
            try:
                if not self._taken(digest, alone):
                    busy.append(digest)
            except (Damaged, NotFound) as error:
                self.wrong[digest] = error
        return busy

    def _taken(self, digest: str, alone: bool) -> bool:
        path, fresh = self.chunks.path(digest), self.fresh
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"no chunk {digest}", where=str(path)) from None
        except OSError as error:
            raise Damaged(f"a chunk cannot be read: {error}", where=str(path)) from error
        try:
            stat = os.fstat(descriptor)
            self.image.map(digest, descriptor, str(path))
            if not fresh and self.chunks.is_verified(digest, stat):
                return True
            if not (alone or fresh) and not locked(descriptor):
                return False
            if not fresh and self.chunks.is_verified(digest, stat):
                return True
            self.hashed_bytes += stat.st_size
            if not self.image.right(digest):
                raise Damaged("a chunk is not what its name says", where=str(path))
            self.chunks.verified(digest, stat)
            if fresh:
                self.image.give_back(digest)
            return True
        finally:
            os.close(descriptor)  # and with it the lock
