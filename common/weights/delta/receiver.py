"""Receiver of deltas: makes missing chunks of a version from chunks that this host has.

A failed delta is no error. If it is missing, has another base or gives another digest, its chunk is
pulled in full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from meshrl.common.api.transfer.deltas import (
    ChunkDelta,
    DeltaBatch,
    DeltaQuery,
    VersionAcknowledgement,
    VersionRef,
)
from meshrl.common.api.weights import STORE_NAME, Manifest, Weights
from meshrl.common.base.errors import BadMessage, CorruptData, DeadlineExceeded, MeshError
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.delta.files import make_chunk
from meshrl.common.weights.delta.policy import is_delta_faster, is_worth_waiting
from meshrl.common.weights.store import chunk_cache
from meshrl.common.weights.store.chunk_cache import VersionToFetch
from meshrl.common.weights.store.weight_store_client import fetch_chunk

MAX_WAIT_S = 2.0  # for more useful deltas: groups of chunks take fractions of it
MIN_RATE_BYTES_PER_S = 1e6  # assumed rate of a pull if none was measured
APPLY_TIMEOUT_S = 120.0  # of one delta
ACKNOWLEDGE_TIMEOUT_S = 2.0  # of a version
MAX_CONCURRENT_APPLIES = 2  # chunks made at a time: one is written while another is assembled
MAX_CONCURRENT_FETCHES = 2  # blobs: one arrives while the other is requested
POLL_S = 0.005  # between checks whether another process has made a chunk
LOCK_WAIT_S = 2.0  # for another process to make a chunk: it is stopped or hangs


async def make_chunks_from_deltas(
    mesh: Mesh,
    bulk: BulkClient,
    version: VersionToFetch,
    target_store: ChunkStore,
    rate_bytes_per_s: float | None = None,
) -> set[str]:
    """Make as many missing chunks of a version as possible from deltas, as files of a host's cache.

    Args:
        rate_bytes_per_s: Measured rate at which bytes arrive here, if known.
    Returns:
        Digests of the chunks that were made; their files are verified and recorded as such.
    """
    making = _DeltaReceiver(mesh, bulk, version, target_store, rate_bytes_per_s)
    try:
        if version.missing:
            await making.make_all(version.manifest_digest)
    except MeshError as error:
        mesh.telemetry.log.warning("no deltas", error=str(error))
    return making.made_chunks


async def acknowledge_version(mesh: Mesh, manifest: Manifest, digest: str) -> None:
    """Report to the store that this host has a complete version, the base of later deltas.

    Call it on hosts other than the store's, once all chunks are files there. Failure is harmless.
    """
    target = VersionRef(manifest.lineage, manifest.version, digest)
    acknowledgement = VersionAcknowledgement(mesh.settings.host, target, manifest.job)
    try:
        async with mesh.clock.timeout(ACKNOWLEDGE_TIMEOUT_S, "the acknowledgement of a version"):
            await mesh.ref(STORE_NAME).call(Weights.acknowledge_version, acknowledgement)
    except MeshError as error:
        mesh.telemetry.log.warning("a version cannot be acknowledged", error=str(error))


class _DeltaReceiver:
    def __init__(
        self,
        mesh: Mesh,
        bulk: BulkClient,
        version: VersionToFetch,
        target_store: ChunkStore,
        rate_bytes_per_s: float | None,
    ) -> None:
        self._mesh, self._bulk, self._target_store, self._rate_bytes_per_s = (
            mesh,
            bulk,
            target_store,
            rate_bytes_per_s,
        )
        self._missing_bytes, self._missing = version.missing, dict(version.missing)
        self._job, self._needed_chunks = version.job, {*version.needed_chunks, *version.missing}
        self.made_chunks: set[str] = set()
        self._fetch_slots = asyncio.Semaphore(MAX_CONCURRENT_FETCHES)
        self._apply_slots = asyncio.Semaphore(MAX_CONCURRENT_APPLIES)
        self._is_stalled = False  # no more deltas are fetched

    async def make_all(self, manifest_digest: str) -> None:
        clock, host, known = self._mesh.clock, self._mesh.settings.host, 0
        patience_s = MAX_WAIT_S if is_worth_waiting(self._rate_bytes_per_s) else 0.0
        until = clock.monotonic() + patience_s
        going_on: list[asyncio.Task[None]] = []
        try:
            while self._missing and not self._is_stalled:
                wait_s = max(0.0, until - clock.monotonic())
                query = DeltaQuery(manifest_digest, host, known, wait_s)
                answer: DeltaBatch = await self._mesh.ref(STORE_NAME).call(
                    Weights.fetch_deltas, query
                )
                known += len(answer.chunks)
                of_use = await self._select_useful(answer.chunks)
                for blob, deltas in of_use.items():
                    going_on.append(asyncio.create_task(self._fetch_and_apply(blob, deltas)))
                if of_use:
                    until = clock.monotonic() + patience_s
                if not answer.has_more or clock.monotonic() >= until:
                    break
            if going_on:
                await asyncio.wait(going_on)
        finally:
            for task in going_on:
                task.cancel()
            await asyncio.gather(*going_on, return_exceptions=True)

    async def _select_useful(self, deltas: Sequence[ChunkDelta]) -> dict[str, list[ChunkDelta]]:
        """Return at most one delta per missing chunk, by blob.

        Only deltas are returned that are faster than a pull and whose old chunk is on this host.
        """

        def select_available() -> list[ChunkDelta]:
            return [delta for delta in sooner if self._target_store.has(delta.old_chunk)]

        sooner = [
            delta
            for delta in deltas
            if delta.new_chunk in self._missing
            and is_delta_faster(
                delta.size_bytes, self._missing[delta.new_chunk], self._rate_bytes_per_s
            )
        ]
        found: dict[str, list[ChunkDelta]] = {}
        for delta in await self._mesh.host.run_blocking(
            select_available, deadline_s=APPLY_TIMEOUT_S
        ):
            if self._missing.pop(delta.new_chunk, None) is not None:
                found.setdefault(delta.blob, []).append(delta)
        return found

    async def _fetch_and_apply(self, blob_digest: str, deltas: Sequence[ChunkDelta]) -> None:
        # From the store, not from peers: a source request takes as long as such a blob does.
        mesh, what = self._mesh, "deltas of weights"
        try:
            room = sum(self._missing_bytes[delta.new_chunk] for delta in deltas)
            # the chunks would have been pulled by then
            within_s = room / (self._rate_bytes_per_s or MIN_RATE_BYTES_PER_S) + MAX_WAIT_S
            about, job, needed = (
                (mesh, self._bulk, blob_digest, what),
                self._job,
                self._needed_chunks,
            )
            async with self._fetch_slots:
                if self._is_stalled:
                    return
                blob = await fetch_chunk(*about, job=job, needed_chunks=needed, timeout_s=within_s)
            await chunk_cache.free_space(mesh, self._target_store, room, needed)
        except MeshError as error:
            self._is_stalled = self._is_stalled or isinstance(error, DeadlineExceeded)
            mesh.telemetry.log.warning("deltas are skipped", blob=blob_digest, error=str(error))
            return
        await asyncio.gather(*(self._apply(delta, memoryview(blob)) for delta in deltas))

    async def _apply(self, delta: ChunkDelta, blob: memoryview) -> None:
        mesh, clock = self._mesh, self._mesh.clock
        part = blob[delta.offset : delta.offset + delta.size_bytes]
        about = self._target_store, delta.old_chunk, part, delta.new_chunk
        try:
            async with self._apply_slots:
                until, run = clock.monotonic() + LOCK_WAIT_S, mesh.host.run_blocking
                while (
                    await run(
                        make_chunk, *about, clock.monotonic() >= until, deadline_s=APPLY_TIMEOUT_S
                    )
                    is None
                ):
                    await clock.sleep(POLL_S)
        except (BadMessage, CorruptData) as error:
            mesh.telemetry.count("deltas_refused")
            mesh.telemetry.log.warning(
                "a delta is rejected", chunk=delta.new_chunk, error=str(error)
            )
        except MeshError as error:
            mesh.telemetry.log.warning(
                "a delta is skipped", chunk=delta.new_chunk, error=str(error)
            )
        else:
            self.made_chunks.add(delta.new_chunk)
            mesh.telemetry.count("deltas_applied")
            mesh.telemetry.count("deltas_applied_bytes", delta.size_bytes)
