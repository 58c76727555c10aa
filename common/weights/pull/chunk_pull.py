"""Fetches the chunks that a host lacks: several at once, over connections that are kept, each from
the store or from a host that has it, as the store says; so any number of hosts fetch a version and
the store sends it about once.

What comes is verified as it comes. A source that stalls, or is far slower than the others, is left
for another one, which goes on at the byte.
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

MAX_STREAMS = 4  # at once; the store gives fewer while hosts relay
REPORT_INTERVAL_S = 1.0  # between two words with the store, which forgets who says nothing
PAUSE_S = 0.05  # after a failed transfer, twice as long after each in a row
MAX_DOUBLINGS = 5  # times at most
CACHE_POLL_S = 0.2  # between two looks for what other processes of the host have fetched
SLOW_FACTOR = 8.0  # times slower than the others: beyond what sharing a link explains
MIN_SLOW_S = 2.0  # for which it must be
IO_TIMEOUT_S = 60.0  # to look at the directory
LAST_REPORT_TIMEOUT_S = 1.0  # for the store to hear that it is over, which it notices itself


@dataclass(frozen=True)
class MissingChunk:
    """A chunk, and how many bytes it has."""

    digest: str
    size_bytes: int


@dataclass
class PullResult:
    """What a pull has fetched over the network, in bytes, and how long it took."""

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
) -> PullResult:
    """Returns once all chunks are files of `target_store`: those that were there are not looked
    into. The store is told of these, and of those that were `made_chunks` here, so that others get
    them. What is `needed_chunks` beside them does not go to make room. NotFound or Damaged when the
    store does not hold one as it was written, once all the others are there; StorageFull.
    """
    with mesh.wait("weights", on=STORE_NAME):
        lacking = {one.digest: one for one in missing}
        return await _ChunkPull(mesh, bulk, target_store, job).run(
            lacking, made_chunks, {*needed_chunks, *made_chunks, *lacking}
        )


@dataclass
class _ChunkStream:
    origin: ChunkOrigin
    started_at: float
    initial_bytes: int  # bytes that were there when it began


class _ChunkPull:
    def __init__(self, mesh: Mesh, bulk: BulkClient, target_store: ChunkStore, job: str) -> None:
        self._mesh, self._bulk, self._target_store = mesh, bulk, target_store
        self._incoming = IncomingChunks(mesh, bulk, target_store, job)
        self._tracker_session = TrackerSession(mesh)
        self._missing: dict[str, MissingChunk] = {}
        self._streams: dict[asyncio.Task[bool], _ChunkStream] = {}
        self._speeds_bytes_per_s: list[float] = []  # bytes per second of transfers that ended well
        self._errors: list[MeshError] = []
        self._result = PullResult()
        self._consecutive_failures = 0  # of transfers one after the other, in which nothing came
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
            try:  # others are to know of what came to this host by another way
                await self._tracker_session.find_server()
                await self._tracker_session.close()
            except MeshError as error:
                self._mesh.telemetry.log.info("the store is not told", error=str(error))
            return self._result
        size = sum(one.size_bytes for one in self._missing.values())
        await chunk_cache.free_space(self._mesh, self._target_store, size, needed_chunks)
        await self._tracker_session.find_server()
        try:
            while self._missing:
                await self._run_once()
            await self._tracker_session.close()
        finally:
            self._retry_policy.close()
            for task in self._streams:
                task.cancel()
            await asyncio.gather(*self._streams, return_exceptions=True)
            self._incoming.close()
        self._result.duration_s = clock.monotonic() - began
        if self._errors:  # all that could be had is there, so that the rest is made at once
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
        if (
            origin.chunk in self._chunks_in_progress()
        ):  # the store was started anew, and does not know
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
                stream, PeerLost("it is far slower than others were", where=source)
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
            gone = not error.retryable and not isinstance(error, HandshakeFailed)
            if gone and source == STORE_NAME:
                raise
            self._record_failure(stream, error, is_gone=gone)
        else:
            self._record_progress()
            if not fetched:
                self._record_found([chunk])
                return
            wanted, now = self._missing.pop(chunk, None), self._mesh.clock.monotonic()
            size = wanted.size_bytes if wanted is not None else 0
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
        """Another source goes on; the error, once nothing has come for too long. `is_gone`: this
        one is not asked for the chunk again.
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
        """Ends transfers that are far slower than others were: another source goes on."""
        if not self._speeds_bytes_per_s:
            return
        recent = sorted(self._speeds_bytes_per_s[-MAX_STREAMS * 2 :])
        usual, now = recent[len(recent) // 2], self._mesh.clock.monotonic()
        for task, stream in self._streams.items():
            moved = self._incoming.received_bytes(stream.origin.chunk) - stream.initial_bytes
            lasted_s = now - stream.started_at
            if lasted_s > MIN_SLOW_S and moved / lasted_s * SLOW_FACTOR < usual:
                self._speeds_bytes_per_s.append(
                    moved / lasted_s
                )  # where none is faster, it is not left again
                task.cancel()


class TrackerSession:
    """One fetch, as the store knows it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._store = mesh, mesh.ref(STORE_NAME)
        self._name = f"{mesh.name} {mesh.random.hex_token(4)}"
        self._server = ""
        self._is_registered = False
        self._new_chunks: list[str] = []
        self._failed_transfers: list[FailedTransfer] = []
        self._retry_policy = RetryPolicy(mesh.clock)

    async def find_server(self) -> None:
        """Looks up who serves on what this host has; StateUnavailable."""
        name = f"node/{self._mesh.settings.host}"
        found = await registry.lookup(self._mesh.state, name)
        self._server = name if found is not None and found.alive and found.bulk else ""

    def add_present(self, chunks: Iterable[str]) -> None:
        """Chunks are there, and served on."""
        self._new_chunks += chunks

    def add_failure(self, chunk: str, source: str, *, is_gone: bool) -> None:
        """A chunk has not come from a source. `is_gone`: that has not got it as it should be."""
        self._failed_transfers.append(FailedTransfer(chunk, source, is_gone))

    async def request_sources(
        self, missing: Iterable[str], max_chunks: int
    ) -> SourceAssignments | None:
        """Who is to be asked for what; None while the store does not answer. Its error, once that
        has lasted for too long.
        """
        held, failed, self._new_chunks, self._failed_transfers = (
            self._new_chunks,
            self._failed_transfers,
            [],
            [],
        )
        told = None if self._is_registered else list(missing)
        asked = SourceRequest(
            self._name, self._mesh.settings.host, self._server, max_chunks, told, held, failed
        )
        try:
            answer: SourceAssignments = await self._store.call(Weights.assign_sources, asked)
        except MeshError as error:
            self._new_chunks, self._failed_transfers, self._is_registered = (
                held + self._new_chunks,
                failed + self._failed_transfers,
                False,
            )
            self._retry_policy.record_failure(error)
            return None
        self._retry_policy.record_success()
        self._is_registered = answer.is_known
        if not answer.is_known:
            self._new_chunks, self._failed_transfers = (
                held + self._new_chunks,
                failed + self._failed_transfers,
            )
        return answer

    async def close(self) -> None:
        """Tells the store that nothing more is fetched, and what has come last."""
        self._retry_policy.close()
        host = self._mesh.settings.host
        if not (self._new_chunks or self._failed_transfers or self._is_registered):
            return
        told = None if self._is_registered else list[str]()
        last = SourceRequest(
            self._name,
            host,
            self._server,
            0,
            told,
            self._new_chunks,
            self._failed_transfers,
            is_last=True,
        )
        with suppress(MeshError):
            await self._store.call(Weights.assign_sources, last, deadline_s=LAST_REPORT_TIMEOUT_S)
