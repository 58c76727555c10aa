"""Sender of deltas: encodes deltas to a staged version in the background.

The bases are versions that receivers have acknowledged to the store. A receiver that failed to
apply one delta therefore gets the next one from a version it has. The sender retains no weights:
the chunks of both versions are files of its host, of which two are mapped at a time.
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

REQUEST_TIMEOUT_S = 2.0  # of a step, until the store has answered whether deltas are needed
ENCODE_TIMEOUT_S = 120.0  # to encode and store the delta of a chunk
# Of chunks whose deltas share a blob and are published together: receivers apply them while
# the next are encoded. With less, small files cost more than their content.
MAX_GROUP_BYTES = 32 << 20
MAX_CONCURRENT_ENCODES = 2  # chunks encoded at a time: one is written while another is encoded


class DeltaSender:
    """Sender of deltas, one per process that stages versions of a job; leaving the context stops
    it.
    """

    def __init__(
        self,
        mesh: Mesh,
        bulk: BulkClient,
        job: str,
        config: TrainingConfig,
        *,
        max_group_bytes: int = MAX_GROUP_BYTES,
    ) -> None:
        """Create an idle sender.

        Args:
            config: Settings of the job: whether deltas are made, and which versions are anchors.
        """
        self._mesh, self._bulk, self._job, self._config = mesh, bulk, job, config
        self._max_group_bytes = max_group_bytes
        self._task: asyncio.Task[None] | None = None
        self._last_error = ""  # the last unexpected error, until deltas are made again

    async def __aenter__(self) -> DeltaSender:
        return self

    async def __aexit__(self, *about: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop encoding: receivers pull the remaining chunks in full."""
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
        """Start encoding deltas to a version that is staged but not committed.

        Once it returns, the store makes requests for these deltas wait.

        Args:
            chunks: Chunks to encode; None: all of the version.
            part: Index of this process among `parts` processes that encode.
        Returns:
            False if no other host receives or the store does not answer: then there are no deltas,
            and
            versions are pulled in full.
        """
        await self.stop()  # deltas to an earlier version are no longer needed
        if self._config.deltas == "off":
            return False
        anchors, host = self._config.delta_anchors, self._mesh.settings.host
        request = BeginDelta(self._job, target, anchors, part, parts, host)
        try:
            async with self._mesh.clock.timeout(REQUEST_TIMEOUT_S, "the request for deltas"):
                bases = (await self._mesh.ref(STORE_NAME).call(Weights.begin_deltas, request)).bases
        except MeshError as error:
            self._record_failure(error)
            return False
        if bases:
            delta_round = _DeltaRound(self._mesh, self._bulk, target, part, self._max_group_bytes)

            async def make_all() -> None:
                try:
                    await delta_round.make_since(bases, chunks)
                except Exception as error:  # this task is not awaited: record the error here
                    self._record_failure(error)
                    with suppress(MeshError):
                        # no receiver has to wait for the rest
                        await delta_round.publish_group([], bases[0], is_last=True)
                else:
                    self._last_error = ""

            self._task = asyncio.create_task(make_all(), name=f"deltas to version {target.version}")
            self._task.add_done_callback(consume_exception)
        else:
            self._last_error = ""  # no deltas are needed any more
        return bool(bases)

    async def wait_until_done(self) -> None:
        """Wait until the current encoding ends."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _record_failure(self, error: Exception) -> None:
        """Record an error; versions are then sent in full.

        An error that is no MeshError is a defect or a problem of this host, so it stays in the
        statistics.
        """
        telemetry = self._mesh.telemetry
        telemetry.count("deltas_failed")
        if isinstance(error, MeshError):
            telemetry.log.warning("no delta", error=str(error))
            return
        self._last_error = f"{type(error).__name__}: {error}"
        then = "versions are sent in full"
        telemetry.log.error("no delta", error=self._last_error, then=then, exc_info=error)

    def stats(self) -> dict[str, str]:
        """Return the reason why deltas cannot be made, empty if they can or none are needed."""
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
        """Return the chunks that may have deltas from a base; none if the base was deleted."""
        store, run = self._mesh.ref(STORE_NAME), self._mesh.host.run_blocking
        if self._target_tensors is None:
            target = await store.call(
                Weights.fetch_manifest, ManifestRequest(self._target.manifest)
            )
            self._target_tensors = target.tensors
        with suppress(NotFound):
            before = await store.call(Weights.fetch_manifest, ManifestRequest(base.manifest))
            found = await run(
                pair_chunks, before.tensors, self._target_tensors, deadline_s=ENCODE_TIMEOUT_S
            )
            return [pair for pair in found if chunks is None or pair.new_digest in chunks]
        return []

    async def _make_group(self, pairs: Sequence[ChunkPair]) -> list[ChunkDelta]:
        """Encode chunks into one stored blob, and return the worthwhile deltas.

        Chunks that are not on this host are left out.
        """
        mesh, run = self._mesh, self._mesh.host.run_blocking
        entry = await look_up_store(mesh)
        stored, cache = await self._bulk.open_local_store(entry), chunk_cache.open_cache(mesh)
        places = [place for place in (stored, cache) if place]
        limit, deltas = asyncio.Semaphore(MAX_CONCURRENT_ENCODES), dict[ChunkPair, bytes]()

        async def one(pair: ChunkPair) -> None:
            async with limit:
                delta = await run(make_delta, places, pair, deadline_s=ENCODE_TIMEOUT_S)
            if delta is not None:
                deltas[pair] = delta

        await run_all(one(pair) for pair in pairs)
        if not deltas:
            return []
        blob = b"".join(deltas.values())
        if stored is not None:
            digest = await run(save_delta, stored, blob, deadline_s=ENCODE_TIMEOUT_S)
        else:
            digest = await self._bulk.put_chunk(entry, blob)
        mesh.telemetry.count("deltas_made", len(deltas))
        mesh.telemetry.count("deltas_made_bytes", len(blob))
        ends = list(accumulate(map(len, deltas.values()), initial=0))
        return [
            ChunkDelta(pair.old_digest, pair.new_digest, digest, begin, len(deltas[pair]))
            for pair, begin in zip(deltas, ends, strict=False)
        ]

    async def publish_group(
        self, deltas: list[ChunkDelta], base: VersionRef, *, is_last: bool = False
    ) -> bool:
        request = StageDelta(DeltaSet(base, self._target, deltas), self._part, is_last)
        return await self._mesh.ref(STORE_NAME).call(Weights.stage_deltas, request)
