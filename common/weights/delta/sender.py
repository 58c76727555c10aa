"""The sender's side: makes the deltas from what receivers hold to a version that was staged, beside
everything else.

A sender keeps no weights for it: the chunks of both versions are files of its host, of which two
are mapped at a time. Bases are what receivers have acknowledged, as the store tells; so a receiver
that failed in the middle of one delta gets the next one from what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import accumulate, zip_longest

from meshrl.common.api.transfer.deltas import (
    BeginDelta,
    ChunkDelta,
    DeltaSet,
    StageDelta,
    VersionRef,
)
from meshrl.common.api.weights import STORE_NAME, ManifestRequest, TensorPiece, Weights
from meshrl.common.base.errors import MeshError, NotFound
from meshrl.common.job.config import TrainingConfig
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.common.mesh.runtime.task_groups import run_all
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.delta.codec import ChunkPair, group_by_size, pair_chunks
from meshrl.common.weights.delta.files import make_delta, save_delta
from meshrl.common.weights.store import chunk_cache
from meshrl.common.weights.store.weight_store_client import look_up_store

REQUEST_TIMEOUT_S = (
    2.0  # of a step, at most, that go by until the store has said whether deltas are wanted
)
ENCODE_TIMEOUT_S = 120.0  # to make the delta of a chunk and put it
# Of chunks whose deltas lie in one blob, and are told of together: receivers apply them while the
# next are made. Less, and small files cost more than what is in them.
MAX_GROUP_BYTES = 32 << 20
MAX_CONCURRENT_ENCODES = (
    2  # chunks of which deltas are made at a time: one is written while another is encoded
)


class DeltaSender:
    """One in each process that stages versions of a job. To leave it ends what goes on."""

    def __init__(
        self,
        mesh: Mesh,
        bulk: BulkClient,
        job: str,
        config: TrainingConfig,
        *,
        max_group_bytes: int = MAX_GROUP_BYTES,
    ) -> None:
        """`config`: of the job, whether deltas are made, and which versions are anchors."""
        self._mesh, self._bulk, self._job, self._config = mesh, bulk, job, config
        self._max_group_bytes = max_group_bytes
        self._task: asyncio.Task[None] | None = None
        self._last_error = ""  # of an error that was not foreseen, until deltas are made again

    async def __aenter__(self) -> DeltaSender:
        return self

    async def __aexit__(self, *about: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Ends what goes on: receivers pull the rest in full."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def start(
        self,
        target: VersionRef,
        *,
        chunks: Collection[str] | None = None,
        part: int = 0,
        parts: int = 1,
    ) -> bool:
        """Begins with the deltas to a version that is staged and not committed, of all its chunks
        or of some: one of `parts` processes that do. Once it returns, whoever asks for them is told
        to wait. False where nobody on another host receives, or the store does not answer: then
        there are none, and nothing is lost.
        """
        await self.stop()  # to an earlier version, which nobody will need
        if self._config.deltas == "off":
            return False
        anchors, host = self._config.delta_anchors, self._mesh.settings.host
        asked = BeginDelta(self._job, target, anchors, part, parts, host)
        try:
            async with self._mesh.clock.timeout(REQUEST_TIMEOUT_S, "deltas to be asked for"):
                bases = (await self._mesh.ref(STORE_NAME).call(Weights.begin_deltas, asked)).bases
        except MeshError as error:
            self._record_failure(error)
            return False
        if bases:
            made = _DeltaRound(self._mesh, self._bulk, target, part, self._max_group_bytes)

            async def make_all() -> None:
                try:
                    await made.make_since(bases, chunks)
                except Exception as error:  # nobody awaits this: it is told here or nowhere
                    self._record_failure(error)
                    with suppress(MeshError):
                        await made.publish_group(
                            [], bases[0], is_last=True
                        )  # nobody waits for the rest
                else:
                    self._last_error = ""

            self._task = asyncio.create_task(make_all(), name=f"deltas to version {target.version}")
            self._task.add_done_callback(consume_exception)
        else:
            self._last_error = ""  # of deltas that nobody wants any more
        return bool(bases)

    async def wait_until_done(self) -> None:
        """Returns once what goes on is at its end."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _record_failure(self, error: Exception) -> None:
        """Versions go in full then. An error of a type that nobody has foreseen is a defect, or of
        this host: a person is to see to it.
        """
        telemetry = self._mesh.telemetry
        telemetry.count("deltas_failed")
        if isinstance(error, MeshError):
            telemetry.log.warning("no delta", error=str(error))
            return
        self._last_error = f"{type(error).__name__}: {error}"
        then = "versions go in full"
        telemetry.log.error("no delta", error=self._last_error, then=then, exc_info=error)

    def stats(self) -> dict[str, str]:
        """Why deltas cannot be made at the moment; empty: they can, or none are wanted."""
        return {"deltas_trouble": self._last_error}


class _DeltaRound:
    def __init__(
        self, mesh: Mesh, bulk: BulkClient, target: VersionRef, part: int, max_group_bytes: int
    ) -> None:
        self._mesh, self._bulk, self._target, self._part = mesh, bulk, target, part
        self._max_group_bytes = max_group_bytes
        self._target_tensors: list[TensorPiece] | None = None

    async def make_since(
        self, base_versions: Sequence[VersionRef], chunks: Collection[str] | None
    ) -> None:
        groups = [
            list(group_by_size(await self._pair_chunks(one, chunks), self._max_group_bytes))
            for one in base_versions
        ]
        for row in zip_longest(*groups, fillvalue=[]):
            for base, pairs in zip(base_versions, row, strict=True):
                found = await self._make_group(pairs)
                if found and not await self.publish_group(found, base):
                    return
        await self.publish_group([], base_versions[0], is_last=True)

    async def _pair_chunks(
        self, base: VersionRef, chunks: Collection[str] | None
    ) -> list[ChunkPair]:
        """The chunks of which there may be deltas from a base; none if that is no more."""
        store, run = self._mesh.ref(STORE_NAME), self._mesh.host.run_blocking
        if self._target_tensors is None:
            target = await store.call(Weights.fetch_manifest, ManifestRequest(self._target.digest))
            self._target_tensors = target.tensors
        with suppress(NotFound):
            before = await store.call(Weights.fetch_manifest, ManifestRequest(base.digest))
            found = await run(
                pair_chunks, before.tensors, self._target_tensors, deadline_s=ENCODE_TIMEOUT_S
            )
            return [pair for pair in found if chunks is None or pair.new_digest in chunks]
        return []

    async def _make_group(self, pairs: Sequence[ChunkPair]) -> list[ChunkDelta]:
        """The deltas of some chunks, in one blob that is stored; of those whose chunks are on this
        host, and that are worth it.
        """
        mesh, run = self._mesh, self._mesh.host.run_blocking
        entry = await look_up_store(mesh)
        stored, cache = await self._bulk.open_local_store(entry), chunk_cache.open_cache(mesh)
        places = [place for place in (stored, cache) if place]
        limit, made = asyncio.Semaphore(MAX_CONCURRENT_ENCODES), dict[ChunkPair, bytes]()

        async def one(pair: ChunkPair) -> None:
            async with limit:
                delta = await run(make_delta, places, pair, deadline_s=ENCODE_TIMEOUT_S)
            if delta is not None:
                made[pair] = delta

        await run_all(one(pair) for pair in pairs)
        if not made:
            return []
        blob = b"".join(made.values())
        if stored is not None:
            digest = await run(save_delta, stored, blob, deadline_s=ENCODE_TIMEOUT_S)
        else:
            digest = await self._bulk.put_chunk(entry, blob)
        mesh.telemetry.count("deltas_made", len(made))
        mesh.telemetry.count("deltas_made_bytes", len(blob))
        ends = list(accumulate(map(len, made.values()), initial=0))
        return [
            ChunkDelta(pair.old_digest, pair.new_digest, digest, begin, len(made[pair]))
            for pair, begin in zip(made, ends, strict=False)
        ]

    async def publish_group(
        self, deltas: list[ChunkDelta], base: VersionRef, *, is_last: bool = False
    ) -> bool:
        request = StageDelta(DeltaSet(base, self._target, deltas), self._part, is_last)
        return await self._mesh.ref(STORE_NAME).call(Weights.stage_deltas, request)
