"""Pull of the chunks that a host is missing, several at once, over pooled connections.

The store assigns a source to each chunk: itself, or a host that has the chunk. Any number of hosts
can therefore fetch a version while the store sends it about once. Chunks are verified as they
arrive. If a source stalls or is far slower than others, another one continues at the same byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from meshrl.common.api.weights import (
    STORE_NAME,
    ChunkOrigin,
    FailedTransfer,
    SourceAssignments,
    SourceRequest,
    Weights,
)
from meshrl.common.base.errors import (
    CorruptData,
    HandshakeFailed,
    MeshError,
    NotFound,
    PeerLost,
    StorageFull,
)
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import RetryPolicy
from meshrl.common.state import registry
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.pull.incoming_chunks import IncomingChunks
from meshrl.common.weights.store import chunk_cache

MAX_STREAMS = 4  # at once; the store assigns fewer while hosts relay
REPORT_INTERVAL_S = 1.0  # between reports to the store, which forgets silent processes
PAUSE_S = 0.05  # after a failed transfer, doubled after each consecutive one
MAX_DOUBLINGS = 5  # of that pause
CACHE_POLL_S = 0.2  # between checks for chunks fetched by other processes of the host
SLOW_FACTOR = 8.0  # times slower than the others: more than sharing a link explains
MIN_SLOW_S = 2.0  # minimum duration before a transfer counts as slow
IO_TIMEOUT_S = 60.0  # to check the directory
LAST_REPORT_TIMEOUT_S = 1.0  # for the last report; the store notices the end anyway


@dataclass(frozen=True)
class MissingChunk:
    """Chunk to fetch, with its size."""

    digest: str
    size_bytes: int


@dataclass
class PullResult:
    """Bytes that a pull fetched over the network, and its duration."""

    fetched_bytes: int = 0
    duration_s: float = 0.0
    store_bytes: int = 0


async def pull_chunks(
    mesh: Mesh,
    bulk: BulkClient,
    missing: Sequence[MissingChunk],
    target_store: ChunkStore,
    *,
    made_chunks: Collection[str] = (),
    needed_chunks: Collection[str] = (),
    job: str = "",
    is_joining: bool = False,
) -> PullResult:
    """Fetch chunks until all are files of `target_store`; files already there are not verified.

    Chunks already there and `made_chunks` are reported to the store, so that other hosts get them.
    `needed_chunks` are not evicted to make room. `is_joining`: the process has no version yet, so
    the store lets updates of others come first.

    Raises:
        NotFound: The store does not have a chunk; raised after all others were fetched.
        CorruptData: The store's chunk is corrupt; raised after all others were fetched.
        StorageFull: The disk is full.
    """
    with mesh.wait("weights", on=STORE_NAME):
        lacking = {one.digest: one for one in missing}
        pull = _ChunkPull(mesh, bulk, target_store, job, is_joining=is_joining)
        return await pull.run(lacking, made_chunks, {*needed_chunks, *made_chunks, *lacking})


@dataclass
class _ChunkStream:
    origin: ChunkOrigin
    started_at: float
    initial_bytes: int  # when the stream began


class _ChunkPull:
    def __init__(
        self,
        mesh: Mesh,
        bulk: BulkClient,
        target_store: ChunkStore,
        job: str,
        *,
        is_joining: bool = False,
    ) -> None:
        self._mesh, self._bulk, self._target_store = mesh, bulk, target_store
        self._incoming = IncomingChunks(mesh, bulk, target_store, job)
        self._tracker_session = TrackerSession(mesh, is_joining=is_joining)
        self._missing: dict[str, MissingChunk] = {}
        self._streams: dict[asyncio.Task[bool], _ChunkStream] = {}
        self._speeds_bytes_per_s: list[float] = []  # of completed transfers
        self._errors: list[MeshError] = []
        self._result = PullResult()
        self._consecutive_failures = 0  # transfers in a row in which no byte arrived
        self._retry_policy = RetryPolicy(mesh.clock)
        self._polled_at = -CACHE_POLL_S

    async def run(
        self,
        missing: dict[str, MissingChunk],
        made_chunks: Collection[str],
        needed_chunks: Collection[str],
    ) -> PullResult:
        clock, began = self._mesh.clock, self._mesh.clock.monotonic()
        self._missing = missing
        self._tracker_session.add_present(made_chunks)
        await self._poll_cache()
        if not self._missing:
            try:  # report chunks that reached this host by another transport
                await self._tracker_session.find_server()
                await self._tracker_session.close()
            except MeshError as error:
                self._mesh.telemetry.log.info(
                    "the weight store cannot be notified", error=str(error)
                )
            return self._result
        size = sum(one.size_bytes for one in self._missing.values())
        await chunk_cache.free_space(self._mesh, self._target_store, size, needed_chunks)
        await self._tracker_session.find_server()
        try:
            while self._missing:
                await self._run_once()
            await self._tracker_session.close()
        except asyncio.CancelledError:  # a newer version: its sources are free at once
            await self._tracker_session.close()
            raise
        finally:
            self._retry_policy.close()
            for task in self._streams:
                task.cancel()
            await asyncio.gather(*self._streams, return_exceptions=True)
            self._incoming.close()
        self._result.duration_s = clock.monotonic() - began
        if self._errors:  # raised last, so that all missing chunks are made again at once
            raise self._errors[0]
        return self._result

    async def _run_once(self) -> None:
        if self._consecutive_failures and not self._streams:
            await self._mesh.clock.sleep(
                min(
                    PAUSE_S * 2 ** min(self._consecutive_failures, MAX_DOUBLINGS), REPORT_INTERVAL_S
                )
            )
        room = MAX_STREAMS - len(self._streams)
        answer = await self._tracker_session.request_sources(self._missing, room)
        for pair in answer.origins if answer is not None else ():
            self._start_stream(pair)
        within_s = REPORT_INTERVAL_S
        if answer is not None and (not answer.is_known or len(answer.origins) < room):
            within_s = answer.retry_after_s if answer.is_known else 0.0
        if self._streams:
            first = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait(self._streams, timeout=within_s, return_when=first)
            for task in done:
                self._finish_stream(task, self._streams.pop(task))
        else:
            await self._mesh.clock.sleep(within_s)
        await self._poll_cache()
        self._cancel_slow_streams()

    def _chunks_in_progress(self) -> set[str]:
        return {stream.origin.chunk for stream in self._streams.values()}

    def _start_stream(self, origin: ChunkOrigin) -> None:
        if origin.chunk not in self._missing:  # another process of this host has fetched it
            self._tracker_session.add_present([origin.chunk])
            return
        # the store restarted and has no record of the stream
        if origin.chunk in self._chunks_in_progress():
            return
        now, came = self._mesh.clock.monotonic(), self._incoming.received_bytes(origin.chunk)
        size = self._missing[origin.chunk].size_bytes
        task = asyncio.create_task(
            self._incoming.fetch_from(origin.chunk, size, origin.source), name="chunk"
        )
        self._streams[task] = _ChunkStream(origin, now, came)

    def _finish_stream(self, task: asyncio.Task[bool], stream: _ChunkStream) -> None:
        chunk, source = stream.origin.chunk, stream.origin.source
        try:
            fetched = task.result()
        except asyncio.CancelledError:
            self._record_failure(
                stream, PeerLost("the transfer is far slower than others", where=source)
            )
        except (NotFound, CorruptData) as error:
            self._tracker_session.add_failure(chunk, source, is_gone=True)
            self._mesh.telemetry.count("chunks_gone")
            if source == STORE_NAME:
                self._errors.append(error)
                self._incoming.discard(chunk)
                self._missing.pop(chunk, None)
        except StorageFull:
            raise
        except MeshError as error:
            is_gone = not error.retryable and not isinstance(error, HandshakeFailed)
            if is_gone and source == STORE_NAME:
                raise
            self._record_failure(stream, error, is_gone=is_gone)
        else:
            self._record_progress()
            if not fetched:
                self._record_found([chunk])
                return
            missing_chunk, now = self._missing.pop(chunk, None), self._mesh.clock.monotonic()
            size = missing_chunk.size_bytes if missing_chunk is not None else 0
            self._speeds_bytes_per_s.append(
                (size - stream.initial_bytes) / max(now - stream.started_at, 1e-6)
            )
            self._result.fetched_bytes += size
            self._result.store_bytes += size if source == STORE_NAME else 0
            self._mesh.telemetry.count("chunks_fetched")
            self._mesh.telemetry.count("chunks_fetched_bytes", size)
            self._tracker_session.add_present([chunk])

    def _record_failure(
        self, stream: _ChunkStream, error: MeshError, *, is_gone: bool = False
    ) -> None:
        """Record a failed transfer; another source continues, unless nothing arrived for too long.

        Args:
            is_gone: Do not assign this source for the chunk again.
        Raises:
            MeshError: The error, once the retry policy gives up.
        """
        pair = stream.origin
        if self._incoming.received_bytes(pair.chunk) > stream.initial_bytes:
            self._record_progress()
        self._consecutive_failures += 1
        self._retry_policy.record_failure(error)
        self._mesh.telemetry.count("chunks_failed")
        self._mesh.telemetry.log.info("another source", of=pair.source, error=str(error))
        self._tracker_session.add_failure(pair.chunk, pair.source, is_gone=is_gone)

    def _record_progress(self) -> None:
        self._consecutive_failures = 0
        self._retry_policy.record_success()

    async def _poll_cache(self) -> None:
        now = self._mesh.clock.monotonic()
        if now - self._polled_at < CACHE_POLL_S:
            return
        self._polled_at = now
        coming = self._chunks_in_progress()
        chunks = [chunk for chunk in self._missing if chunk not in coming]

        def used() -> list[str]:
            return [chunk for chunk in chunks if self._target_store.mark_used(chunk)]

        self._record_found(await self._mesh.host.run_blocking(used, deadline_s=IO_TIMEOUT_S))

    def _record_found(self, chunks: list[str]) -> None:
        found = [self._missing.pop(chunk) for chunk in chunks]
        for chunk in chunks:
            self._incoming.discard(chunk)
        self._tracker_session.add_present(chunks)
        self._mesh.telemetry.count("chunks_found", len(found))
        self._mesh.telemetry.count("chunks_found_bytes", sum(one.size_bytes for one in found))

    def _cancel_slow_streams(self) -> None:
        """Cancel transfers that are far slower than recent ones, so that another source
        continues.
        """
        if not self._speeds_bytes_per_s:
            return
        recent = sorted(self._speeds_bytes_per_s[-MAX_STREAMS * 2 :])
        usual, now = recent[len(recent) // 2], self._mesh.clock.monotonic()
        for task, stream in self._streams.items():
            moved = self._incoming.received_bytes(stream.origin.chunk) - stream.initial_bytes
            lasted_s = now - stream.started_at
            if lasted_s > MIN_SLOW_S and moved / lasted_s * SLOW_FACTOR < usual:
                # lower the median, so that a slow network does not cancel every stream
                self._speeds_bytes_per_s.append(moved / lasted_s)
                task.cancel()


class TrackerSession:
    """One fetch as registered with the store's tracker."""

    def __init__(self, mesh: Mesh, *, is_joining: bool = False) -> None:
        self._mesh, self._store = mesh, mesh.ref(STORE_NAME)
        self._is_joining = is_joining
        self._name = f"{mesh.name} {mesh.random.hex_token(4)}"
        self._server = ""
        self._is_registered = False
        self._new_chunks: list[str] = []
        self._failed_transfers: list[FailedTransfer] = []
        self._retry_policy = RetryPolicy(mesh.clock)

    async def find_server(self) -> None:
        """Look up the process that serves this host's chunks. StateUnavailable."""
        name = f"node/{self._mesh.settings.host}"
        found = await registry.lookup(self._mesh.state, name)
        self._server = name if found is not None and found.alive and found.bulk else ""

    def add_present(self, chunks: Iterable[str]) -> None:
        """Record chunks that are on this host and served to others."""
        self._new_chunks += chunks

    def add_failure(self, chunk: str, source: str, *, is_gone: bool) -> None:
        """Record a failed transfer. `is_gone`: the source does not have a valid chunk."""
        self._failed_transfers.append(FailedTransfer(chunk, source, is_gone))

    async def request_sources(
        self, missing: Iterable[str], max_chunks: int
    ) -> SourceAssignments | None:
        """Request sources for chunks from the store; None while it does not answer.

        Its error is raised once that lasts too long.
        """
        new_chunks, failed, self._new_chunks, self._failed_transfers = (
            self._new_chunks,
            self._failed_transfers,
            [],
            [],
        )
        missing_ids = None if self._is_registered else list(missing)
        request = SourceRequest(
            self._name,
            self._mesh.settings.host,
            self._server,
            max_chunks,
            missing_ids,
            new_chunks,
            failed,
            network=self._mesh.settings.network,
            is_joining=self._is_joining,
        )
        try:
            answer: SourceAssignments = await self._store.call(Weights.assign_sources, request)
        except MeshError as error:
            self._new_chunks, self._failed_transfers, self._is_registered = (
                new_chunks + self._new_chunks,
                failed + self._failed_transfers,
                False,
            )
            self._retry_policy.record_failure(error)
            return None
        self._retry_policy.record_success()
        self._is_registered = answer.is_known
        if not answer.is_known:
            self._new_chunks, self._failed_transfers = (
                new_chunks + self._new_chunks,
                failed + self._failed_transfers,
            )
        return answer

    async def close(self) -> None:
        """Report the last chunks and the end of the fetch to the store."""
        self._retry_policy.close()
        host = self._mesh.settings.host
        if not (self._new_chunks or self._failed_transfers or self._is_registered):
            return
        missing_ids = None if self._is_registered else list[str]()
        last = SourceRequest(
            self._name,
            host,
            self._server,
            0,
            missing_ids,
            self._new_chunks,
            self._failed_transfers,
            is_last=True,
            network=self._mesh.settings.network,
        )
        with suppress(MeshError):
            await self._store.call(Weights.assign_sources, last, deadline_s=LAST_REPORT_TIMEOUT_S)
