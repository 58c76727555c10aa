"""The bulk port for large bytes beside the control traffic: chunks by digest over TCP, or straight
from the file on the same host.

Both ends of a connection prove first who they are (`doors.py`). Then a
request is a verb, a digest and which part of the chunk; an answer a status and a length; then
bytes. What is larger than memory travels in parts, each with a deadline of its own, and goes on
where it was when a connection breaks. A client on the same host reads and writes the files
themselves.
"""

from __future__ import annotations

import functools
import math
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from meshrl.common.api.transfer.bulk import WEIGHTS
from meshrl.common.base.digest import digest_of
from meshrl.common.base.errors import (
    Damaged,
    HandshakeFailed,
    NotAllowed,
    Refused,
    WrongKeys,
)
from meshrl.common.weights.bulk.channel import Rates
from meshrl.common.weights.bulk.doors import Door, InterpreterDoor, KeyDoor
from meshrl.common.weights.bulk.server import LARGEST_BYTES, BulkServer
from meshrl.common.weights.bulk.session import HAS, NO_CHUNK, PUT, WHERE, BulkSession
from meshrl.common.weights.bulk.transfer import PART_BYTES, Kept, Transfer
from meshrl.common.weights.chunks.chunks import ChunkStore, DamageEvent
from meshrl.common.weights.chunks.partial import Partial

if TYPE_CHECKING:
    from meshrl.common.mesh.runtime.mesh import Mesh
    from meshrl.common.state.registry import Entry

__all__ = ["BulkClient", "BulkServer", "ChunkStore", "serve"]

T = TypeVar("T")
DEADLINE_S = 120.0
REFUSED_S = 30.0  # of failing handshakes with one process: more than its restart takes
REMEMBERED = 1024  # processes at which they fail
FILE_S = 6 * 3600.0  # deadline of a whole file: 100 GB at 5 MB/s


def door_of(mesh: Mesh) -> Door:
    """Return the door of a process's bulk port."""
    if mesh.doorway is None:
        return InterpreterDoor(mesh.settings.sealed)
    return KeyDoor(mesh.doorway.keys, mesh.kind, mesh.settings.sealed)


def serve(mesh: Mesh, chunks: ChunkStore, *, takes: bool = True) -> BulkServer:
    """The bulk port of a process, which serves these chunks until it is closed. `takes`: also such
    as others put there.
    """
    settings = mesh.settings
    door = door_of(mesh)
    rates = Rates.of(settings)
    server = BulkServer(
        chunks, mesh.host, settings.bind, settings.advertise, door=door, rates=rates, takes=takes
    )
    mesh.rejections.add(lambda: server.refused)
    return server


class BulkClient:
    """Gets and puts chunks of whoever serves them; every transfer runs off the loop and has a
    deadline.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        largest_bytes: int = LARGEST_BYTES,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """`largest_bytes`: of what is in memory whole. `part_bytes`: of a file in one request."""
        self._mesh, self._largest_bytes, self._part_bytes = mesh, largest_bytes, part_bytes
        self._door, self._rates, self._kept = door_of(mesh), Rates.of(mesh.settings), Kept()
        self._directories: dict[str, bytes] = {}  # that are served, by address, with key
        self._stores: dict[Path, ChunkStore] = {}  # of this host, by directory
        self._refused_since: dict[str, float] = {}  # handshakes one after the other; by incarnation
        self.untold: deque[DamageEvent] = deque()  # see ChunkStore

    async def get(
        self,
        entry: Entry,
        digest: str,
        *,
        space: str = WEIGHTS,
        deadline_s: float = DEADLINE_S,
        stall_s: float = math.inf,
    ) -> bytes:
        """The bytes of `digest`, checked. NotFound, PeerLost, Damaged when they were changed;
        DeadlineExceeded, also when nothing moves for `stall_s`.
        """
        chunks = await self.local(entry)
        if chunks is not None:
            return await self._off_loop(lambda: chunks.space(space).read(digest), deadline_s)

        def fetch() -> bytes:
            with self._session(entry, deadline_s, stall_s) as session:
                content = session.chunk(digest, space)
            if digest_of(content) != digest:
                raise Damaged(f"chunk {digest} arrived changed", where=entry.bulk)
            return content

        return await self._ask(entry, fetch, deadline_s)

    async def lent(self, entry: Entry, name: str, *, deadline_s: float = DEADLINE_S) -> bytes:
        """The bytes that lie under a name which is no digest of them, so that whoever asks checks
        them, over a connection that is kept for the next. NotFound, PeerLost, DeadlineExceeded.
        """
        await self._mesh.check(entry, bulk=True)
        key = f"{entry.address} {entry.bulk}"

        def fetch() -> bytes:
            connect = functools.partial(self._session, entry, deadline_s)
            return self._kept.over(key, connect, lambda session: session.chunk(name))

        return await self._ask(entry, fetch, deadline_s)

    async def put(
        self,
        entry: Entry,
        content: bytes | memoryview,
        *,
        space: str = WEIGHTS,
        deadline_s: float = DEADLINE_S,
    ) -> str:
        """The digest of `content`, which is durable then. StorageFull, PeerLost; Refused when it is
        too large, also by a file: who is on another host could not get it.
        """
        size = memoryview(content).nbytes
        if size > self._largest_bytes:
            raise Refused(
                f"a chunk of {size} bytes; the bulk port takes {self._largest_bytes}",
                where=entry.bulk,
                fix="Put it in pieces, as weights are",
            )
        chunks = await self.local(entry)
        if chunks is not None:
            return await self._off_loop(lambda: chunks.space(space).write(content), deadline_s)

        def send() -> str:
            digest = digest_of(content)
            with self._session(entry, deadline_s) as session:
                if session.ask(HAS, digest, space=space) != b"\x01":
                    session.ask(PUT, digest, content, space=space)
            return digest

        return await self._ask(entry, send, deadline_s)

    async def receive(
        self,
        entry: Entry,
        partial: Partial,
        *,
        space: str = WEIGHTS,
    ) -> None:
        """Makes the bytes of a digest the file (mode 0600) of `partial`, there whole, durable and
        checked, or not at all; they may be more than memory holds. It goes on where `partial` is,
        which may have begun at another server, and PeerLost leaves it as far as it has come.
        NotFound, StorageFull, Damaged when they were changed.
        """
        await self._fill(entry, partial, self._transfer(entry), space)

    async def arrive(
        self,
        entry: Entry,
        partial: Partial,
        size: int,
        *,
        stall_s: float,
    ) -> None:
        """Adds what one server has of a chunk of `size` bytes to `partial`, from where that is,
        over a connection that is kept for the next one; it is neither checked nor committed.
        NotFound, StorageFull; Damaged when that server has another size of it, or sends less;
        PeerLost, DeadlineExceeded when nothing moves for `stall_s`: both leave it as far as it has
        come, for this server or another.
        """
        connect = functools.partial(self._session, entry, FILE_S, stall_s)
        kept = self._kept, f"{entry.address} {entry.bulk}"
        await self._fill(entry, partial, Transfer(connect, self._part_bytes, *kept), whole=size)

    async def _fill(
        self,
        entry: Entry,
        partial: Partial,
        transfer: Transfer,
        space: str = WEIGHTS,
        whole: int | None = None,
    ) -> None:
        """Writes what lacks; it is checked and committed unless the caller does so, who knows how
        many bytes the `whole` has.
        """
        chunks = await self.local(entry)
        with partial.writer() as writer:

            def fill() -> None:
                if chunks is None:
                    transfer.fetch(writer, space, whole)
                else:
                    for block in chunks.space(space).blocks(writer.digest, writer.position):
                        if whole is not None and writer.position + len(block) > whole:
                            where = str(chunks.directory)
                            raise Damaged("a chunk has another size there", where=where)
                        writer.write(block)
                if whole is None:
                    writer.finish(entry.bulk)

            try:
                await self._ask(entry, fill, FILE_S)
            finally:  # nothing goes on when nobody waits any more
                transfer.stop()

    async def put_file(self, entry: Entry, path: Path, *, deadline_s: float = FILE_S) -> str:
        """The digest of a file's content, which is durable there then; it may be more than memory
        holds. StorageFull, PeerLost; BadMessage when the file changes meanwhile.
        """
        chunks = await self.local(entry)
        if chunks is not None:
            return await self._off_loop(lambda: chunks.write_file(path), deadline_s)
        transfer = self._transfer(entry)
        try:
            return await self._ask(entry, lambda: transfer.send(path), deadline_s)
        finally:
            transfer.stop()

    def _transfer(self, entry: Entry) -> Transfer:
        return Transfer(lambda: self._session(entry, DEADLINE_S), self._part_bytes)

    async def local(self, entry: Entry) -> ChunkStore | None:
        """The files themselves, for who is on their host. HandshakeFailed, after a while WrongKeys:
        the entry is not of the process that it names.
        """
        await self._mesh.check(entry, bulk=True)
        directory = Path(entry.bulk.partition("#")[2])
        near = entry.host == self._mesh.settings.host and directory.is_absolute()
        if near and os.access(directory, os.W_OK) and await self._lends(entry, directory):
            if directory not in self._stores:
                self._stores[directory] = ChunkStore(directory, self._mesh.clock.wall, self.untold)
            return self._stores[directory]
        return None

    async def _lends(self, entry: Entry, directory: Path) -> bool:
        """Whether the process of an entry serves this directory. Where others may write the
        registry, too, the process itself tells, over a connection on which it proves its key.
        """
        if self._mesh.doorway is None:
            return True
        told = self._directories.get(entry.address, b"")
        if not told:

            def ask() -> bytes:
                with self._session(entry, DEADLINE_S) as session:
                    return session.ask(WHERE, NO_CHUNK)

            told = await self._ask(entry, ask, DEADLINE_S)
            if len(self._directories) >= REMEMBERED:
                self._directories.clear()
            self._directories[entry.address] = told
        return told == os.fsencode(directory)

    def _session(self, entry: Entry, deadline_s: float, stall_s: float = math.inf) -> BulkSession:
        place = entry.bulk.partition("#")[0]
        proof = self._door.asking(entry.address, place)
        most, rates = self._largest_bytes, self._rates
        return BulkSession(place, proof, deadline_s, most, rates=rates, stall_s=stall_s)

    async def _ask(self, entry: Entry, work: Callable[[], T], deadline_s: float) -> T:
        """The result of asking a bulk port, off the loop. WrongKeys when its handshakes have failed
        for so long that no restart explains it.
        """
        now = self._mesh.clock.monotonic()
        try:
            result = await self._off_loop(work, deadline_s)
        except (HandshakeFailed, NotAllowed) as error:
            if self._mesh.doorway is not None:
                self._mesh.doorway.doubt(entry.address)  # whose our keys are may have changed
            if isinstance(error, NotAllowed):
                raise
            if len(self._refused_since) >= REMEMBERED:
                self._refused_since.clear()
            since = self._refused_since.setdefault(entry.incarnation, now)
            if now - max(since, self._mesh.silent_at) > REFUSED_S:
                raise WrongKeys(error.message, where=error.where, fix=error.fix) from error
            raise
        self._refused_since.pop(entry.incarnation, None)
        return result

    async def _off_loop(self, work: Callable[[], T], deadline_s: float) -> T:
        return await self._mesh.host.run_blocking(work, deadline_s=deadline_s)
