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

from meshrl.common.api.weights import STORE, ChunkOrigin, FailedTransfer, Seek, Sources, Weights
from meshrl.common.base.errors import (
    Damaged,
    HandshakeFailed,
    MeshError,
    NotFound,
    PeerLost,
    StorageFull,
)
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import Patience
from meshrl.common.state import registry
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.pull.arriving import Arriving
from meshrl.common.weights.store import host_chunks

STREAMS = 4  # at once; the store gives fewer while hosts relay
TELL_S = 1.0  # between two words with the store, which forgets who says nothing
PAUSE_S = 0.05  # after a failed transfer, twice as long after each in a row
DOUBLED = 5  # times at most
FOUND_S = 0.2  # between two looks for what other processes of the host have fetched
SLOW = 8.0  # times slower than the others: beyond what sharing a link explains
SLOW_S = 2.0  # for which it must be
IO_S = 60.0  # to look at the directory
OVER_S = 1.0  # for the store to hear that it is over, which it notices itself


@dataclass(frozen=True)
class Wanted:
    """A chunk, and how many bytes it has."""

    digest: str
    size: int


@dataclass
class Pulled:
    """What a pull has fetched over the network, in bytes, and how long it took."""

    bytes: int = 0
    seconds: float = 0.0
    from_store: int = 0


async def pull(
    mesh: Mesh,
    bulk: BulkClient,
    wanted: Sequence[Wanted],
    into: ChunkStore,
    *,
    made: Collection[str] = (),
    needed: Collection[str] = (),
    job: str = "",
) -> Pulled:
    """Returns once all chunks are files of `into`: those that were there are not looked into. The
    store is told of these, and of those that were `made` here, so that others get them. What is
    `needed` beside them does not go to make room. NotFound or Damaged when the store does not hold
    one as it was written, once all the others are there; StorageFull.
    """
    with mesh.wait("weights", on=STORE):
        lacking = {one.digest: one for one in wanted}
        return await _Pull(mesh, bulk, into, job).run(lacking, made, {*needed, *made, *lacking})


@dataclass
class _Stream:
    pair: ChunkOrigin
    since: float
    began: int  # bytes that were there when it began


class _Pull:
    def __init__(self, mesh: Mesh, bulk: BulkClient, into: ChunkStore, job: str) -> None:
        self._mesh, self._bulk, self._into = mesh, bulk, into
        self._arriving = Arriving(mesh, bulk, into, job)
        self._seeking = Seeking(mesh)
        self._lacking: dict[str, Wanted] = {}
        self._streams: dict[asyncio.Task[bool], _Stream] = {}
        self._speeds: list[float] = []  # bytes per second of transfers that ended well
        self._troubles: list[MeshError] = []
        self._pulled = Pulled()
        self._failures = 0  # of transfers one after the other, in which nothing came
        self._patience = Patience(mesh.clock)
        self._looked_at = -FOUND_S

    async def run(
        self, wanted: dict[str, Wanted], made: Collection[str], needed: Collection[str]
    ) -> Pulled:
        clock, began = self._mesh.clock, self._mesh.clock.monotonic()
        self._lacking = wanted
        self._seeking.holds(made)
        await self._look()
        if not self._lacking:
            try:  # others are to know of what came to this host by another way
                await self._seeking.find_server()
                await self._seeking.over()
            except MeshError as error:
                self._mesh.telemetry.log.info("the store is not told", error=str(error))
            return self._pulled
        size = sum(one.size for one in self._lacking.values())
        await host_chunks.make_room(self._mesh, self._into, size, needed)
        await self._seeking.find_server()
        try:
            while self._lacking:
                await self._turn()
            await self._seeking.over()
        finally:
            self._patience.over()
            for task in self._streams:
                task.cancel()
            await asyncio.gather(*self._streams, return_exceptions=True)
            self._arriving.close()
        self._pulled.seconds = clock.monotonic() - began
        if self._troubles:  # all that could be had is there, so that the rest is made at once
            raise self._troubles[0]
        return self._pulled

    async def _turn(self) -> None:
        if self._failures and not self._streams:
            await self._mesh.clock.sleep(min(PAUSE_S * 2 ** min(self._failures, DOUBLED), TELL_S))
        room = STREAMS - len(self._streams)
        answer = await self._seeking.next(self._lacking, room)
        for pair in answer.pairs if answer is not None else ():
            self._begin(pair)
        within_s = TELL_S
        if answer is not None and (not answer.known or len(answer.pairs) < room):
            within_s = answer.again_s if answer.known else 0.0
        if self._streams:
            first = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait(self._streams, timeout=within_s, return_when=first)
            for task in done:
                self._ended(task, self._streams.pop(task))
        else:
            await self._mesh.clock.sleep(within_s)
        await self._look()
        self._leave_slow()

    def _coming(self) -> set[str]:
        return {stream.pair.chunk for stream in self._streams.values()}

    def _begin(self, pair: ChunkOrigin) -> None:
        if pair.chunk not in self._lacking:  # another process of this host has fetched it
            self._seeking.holds([pair.chunk])
            return
        if pair.chunk in self._coming():  # the store was started anew, and does not know
            return
        now, came = self._mesh.clock.monotonic(), self._arriving.position(pair.chunk)
        size = self._lacking[pair.chunk].size
        task = asyncio.create_task(
            self._arriving.arrive(pair.chunk, size, pair.source), name="chunk"
        )
        self._streams[task] = _Stream(pair, now, came)

    def _ended(self, task: asyncio.Task[bool], stream: _Stream) -> None:
        chunk, source = stream.pair.chunk, stream.pair.source
        try:
            fetched = task.result()
        except asyncio.CancelledError:
            self._failed(stream, PeerLost("it is far slower than others were", where=source))
        except (NotFound, Damaged) as error:
            self._seeking.fails(chunk, source, gone=True)
            self._mesh.telemetry.count("chunks_gone")
            if source == STORE:
                self._troubles.append(error)
                self._arriving.forget(chunk)
                self._lacking.pop(chunk, None)
        except StorageFull:
            raise
        except MeshError as error:
            gone = not error.retryable and not isinstance(error, HandshakeFailed)
            if gone and source == STORE:
                raise
            self._failed(stream, error, gone=gone)
        else:
            self._moves()
            if not fetched:
                self._found([chunk])
                return
            wanted, now = self._lacking.pop(chunk, None), self._mesh.clock.monotonic()
            size = wanted.size if wanted is not None else 0
            self._speeds.append((size - stream.began) / max(now - stream.since, 1e-6))
            self._pulled.bytes += size
            self._pulled.from_store += size if source == STORE else 0
            self._mesh.telemetry.count("chunks_fetched")
            self._mesh.telemetry.count("chunks_fetched_bytes", size)
            self._seeking.holds([chunk])

    def _failed(self, stream: _Stream, error: MeshError, *, gone: bool = False) -> None:
        """Another source goes on; the error, once nothing has come for too long. `gone`: this one
        is not asked for the chunk again.
        """
        pair = stream.pair
        if self._arriving.position(pair.chunk) > stream.began:
            self._moves()
        self._failures += 1
        self._patience.failed(error)
        self._mesh.telemetry.count("chunks_failed")
        self._mesh.telemetry.log.info("another source", of=pair.source, error=str(error))
        self._seeking.fails(pair.chunk, pair.source, gone=gone)

    def _moves(self) -> None:
        self._failures = 0
        self._patience.succeeded()

    async def _look(self) -> None:
        now = self._mesh.clock.monotonic()
        if now - self._looked_at < FOUND_S:
            return
        self._looked_at = now
        coming = self._coming()
        chunks = [chunk for chunk in self._lacking if chunk not in coming]

        def used() -> list[str]:
            return [chunk for chunk in chunks if self._into.use(chunk)]

        self._found(await self._mesh.host.run_blocking(used, deadline_s=IO_S))

    def _found(self, chunks: list[str]) -> None:
        found = [self._lacking.pop(chunk) for chunk in chunks]
        for chunk in chunks:
            self._arriving.forget(chunk)
        self._seeking.holds(chunks)
        self._mesh.telemetry.count("chunks_found", len(found))
        self._mesh.telemetry.count("chunks_found_bytes", sum(one.size for one in found))

    def _leave_slow(self) -> None:
        """Ends transfers that are far slower than others were: another source goes on."""
        if not self._speeds:
            return
        recent = sorted(self._speeds[-STREAMS * 2 :])
        usual, now = recent[len(recent) // 2], self._mesh.clock.monotonic()
        for task, stream in self._streams.items():
            moved = self._arriving.position(stream.pair.chunk) - stream.began
            lasted_s = now - stream.since
            if lasted_s > SLOW_S and moved / lasted_s * SLOW < usual:
                self._speeds.append(moved / lasted_s)  # where none is faster, it is not left again
                task.cancel()


class Seeking:
    """One fetch, as the store knows it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._store = mesh, mesh.ref(STORE)
        self._name = f"{mesh.name} {mesh.random.token(4)}"
        self._server = ""
        self._known = False
        self._held: list[str] = []
        self._failed: list[FailedTransfer] = []
        self._patience = Patience(mesh.clock)

    async def find_server(self) -> None:
        """Looks up who serves on what this host has; StateUnavailable."""
        name = f"node/{self._mesh.settings.host}"
        found = await registry.lookup(self._mesh.state, name)
        self._server = name if found is not None and found.alive and found.bulk else ""

    def holds(self, chunks: Iterable[str]) -> None:
        """Chunks are there, and served on."""
        self._held += chunks

    def fails(self, chunk: str, source: str, *, gone: bool) -> None:
        """A chunk has not come from a source. `gone`: that has not got it as it should be."""
        self._failed.append(FailedTransfer(chunk, source, gone))

    async def next(self, lacking: Iterable[str], room: int) -> Sources | None:
        """Who is to be asked for what; None while the store does not answer. Its error, once that
        has lasted for too long.
        """
        held, failed, self._held, self._failed = self._held, self._failed, [], []
        told = None if self._known else list(lacking)
        asked = Seek(self._name, self._mesh.settings.host, self._server, room, told, held, failed)
        try:
            answer: Sources = await self._store.call(Weights.sources, asked)
        except MeshError as error:
            self._held, self._failed, self._known = held + self._held, failed + self._failed, False
            self._patience.failed(error)
            return None
        self._patience.succeeded()
        self._known = answer.known
        if not answer.known:
            self._held, self._failed = held + self._held, failed + self._failed
        return answer

    async def over(self) -> None:
        """Tells the store that nothing more is fetched, and what has come last."""
        self._patience.over()
        host = self._mesh.settings.host
        if not (self._held or self._failed or self._known):
            return
        told = None if self._known else list[str]()
        last = Seek(self._name, host, self._server, 0, told, self._held, self._failed, over=True)
        with suppress(MeshError):
            await self._store.call(Weights.sources, last, deadline_s=OVER_S)
