"""Bulk port for large data beside the control traffic: chunks by digest over TCP.

Both ends of a connection authenticate first (`authenticators.py`). A request has a verb, a digest
and a range of the chunk; a response has a status and a length; then bytes follow. Data larger than
memory is transferred in parts, each with its own deadline, and continues at the same byte after a
broken connection. A client on the same host reads and writes the files directly.
"""

from __future__ import annotations

import functools
import math
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from meshrl.common.api.transfer.bulk_permissions import WEIGHTS
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import CorruptData, HandshakeFailed, NotAllowed, Refused, WrongKeys
from meshrl.common.weights.bulk.authenticators import (
    BulkAuthenticator,
    InProcessAuthenticator,
    KeyAuthenticator,
)
from meshrl.common.weights.bulk.channel import RateLimits
from meshrl.common.weights.bulk.server import MAX_REQUEST_BYTES, BulkServer
from meshrl.common.weights.bulk.session import DIRECTORY, HAS, NO_DIGEST, PUT, BulkSession
from meshrl.common.weights.bulk.transfer import MAX_PART_BYTES, ConnectionPool, FileTransfer
from meshrl.common.weights.chunks.chunk_store import ChunkStore, CorruptionEvent
from meshrl.common.weights.chunks.partial_file import PartialFile

if TYPE_CHECKING:
    from meshrl.common.mesh.runtime.mesh import Mesh
    from meshrl.common.state.registry import RegistryEntry

__all__ = ["BulkClient", "BulkServer", "ChunkStore", "serve_chunks"]

T = TypeVar("T")
REQUEST_TIMEOUT_S = 120.0
HANDSHAKE_FAILURE_LIMIT_S = (
    30.0  # of failing handshakes with one process: longer than its restart takes
)
MAX_REMEMBERED_PEERS = 1024  # for failing handshakes
FILE_TIMEOUT_S = 6 * 3600.0  # for a whole file: 100 GB at 5 MB/s


def make_authenticator(mesh: Mesh) -> BulkAuthenticator:
    """Return the authenticator of a process's bulk port."""
    if mesh.credentials is None:
        return InProcessAuthenticator(mesh.settings.is_bulk_encrypted)
    return KeyAuthenticator(mesh.credentials.keys, mesh.kind, mesh.settings.is_bulk_encrypted)


def serve_chunks(mesh: Mesh, chunks: ChunkStore, *, accepts_uploads: bool = True) -> BulkServer:
    """Serve chunks on a process's bulk port until the server is closed.

    Args:
        accepts_uploads: Clients may also put chunks.
    """
    settings = mesh.settings
    door = make_authenticator(mesh)
    rates = RateLimits.from_settings(settings)
    server = BulkServer(
        chunks,
        mesh.host,
        settings.bind,
        settings.advertise,
        authenticator=door,
        rates=rates,
        accepts_uploads=accepts_uploads,
    )
    mesh.rejections.add_listener(lambda: server.rejection_counts)
    return server


class BulkClient:
    """Client of bulk ports. Every transfer runs in a thread and has a deadline."""

    def __init__(
        self, mesh: Mesh, *, max_bytes: int = MAX_REQUEST_BYTES, part_bytes: int = MAX_PART_BYTES
    ) -> None:
        """Create the client.

        Args:
            max_bytes: Limit of data held in memory.
            part_bytes: Bytes of a file in one request.
        """
        self._mesh, self._max_bytes, self._part_bytes = mesh, max_bytes, part_bytes
        self._authenticator, self._rates, self._connection_pool = (
            make_authenticator(mesh),
            RateLimits.from_settings(mesh.settings),
            ConnectionPool(),
        )
        self._served_directories: dict[str, bytes] = {}  # served directories by address with key
        self._local_stores: dict[Path, ChunkStore] = {}  # of this host, by directory
        self._handshakes_failing_since: dict[str, float] = {}  # since when, by incarnation
        self.pending_events: deque[CorruptionEvent] = deque()  # see ChunkStore

    async def fetch_chunk(
        self,
        entry: RegistryEntry,
        digest: str,
        *,
        space: str = WEIGHTS,
        deadline_s: float = REQUEST_TIMEOUT_S,
        stall_s: float = math.inf,
    ) -> bytes:
        """Return the bytes of `digest` after checking them.

        Args:
            stall_s: Time without a byte that also raises DeadlineExceeded.
        Raises:
            NotFound: No such chunk.
            PeerLost: The connection failed.
            CorruptData: The bytes changed.
            DeadlineExceeded: The transfer took too long.
        """
        chunks = await self.open_local_store(entry)
        if chunks is not None:
            return await self._run_blocking(
                lambda: chunks.open_space(space).read(digest), deadline_s
            )

        def fetch() -> bytes:
            with self._make_session(entry, deadline_s, stall_s) as session:
                content = session.fetch_chunk(digest, space)
            if compute_digest(content) != digest:
                raise CorruptData(f"chunk {digest} arrived corrupt", where=entry.bulk)
            return content

        return await self._run_request(entry, fetch, deadline_s)

    async def fetch_unchecked(
        self, entry: RegistryEntry, name: str, *, deadline_s: float = REQUEST_TIMEOUT_S
    ) -> bytes:
        """Return bytes stored under a name that is not their digest; the caller checks them.

        It uses a pooled connection. NotFound, PeerLost, DeadlineExceeded.
        """
        await self._mesh.verify_peer(entry, bulk=True)
        key = f"{entry.address} {entry.bulk}"

        def fetch() -> bytes:
            connect = functools.partial(self._make_session, entry, deadline_s)
            return self._connection_pool.run_over(
                key, connect, lambda session: session.fetch_chunk(name)
            )

        return await self._run_request(entry, fetch, deadline_s)

    async def put_chunk(
        self,
        entry: RegistryEntry,
        content: bytes | memoryview,
        *,
        space: str = WEIGHTS,
        deadline_s: float = REQUEST_TIMEOUT_S,
    ) -> str:
        """Store `content` durably and return its digest.

        Raises:
            StorageFull: The disk is full.
            PeerLost: The connection failed.
            Refused: The content is too large, on the same host too, because other hosts could not
                get it.
        """
        size = memoryview(content).nbytes
        if size > self._max_bytes:
            raise Refused(
                f"a chunk has {size} bytes; the limit of the bulk port is {self._max_bytes}",
                where=entry.bulk,
                fix="Send the data in pieces, as for weights",
            )
        chunks = await self.open_local_store(entry)
        if chunks is not None:
            return await self._run_blocking(
                lambda: chunks.open_space(space).write(content), deadline_s
            )

        def send() -> str:
            digest = compute_digest(content)
            with self._make_session(entry, deadline_s) as session:
                if session.request(HAS, digest, space=space) != b"\x01":
                    session.request(PUT, digest, content, space=space)
            return digest

        return await self._run_request(entry, send, deadline_s)

    async def fetch_to_file(
        self, entry: RegistryEntry, partial: PartialFile, *, space: str = WEIGHTS
    ) -> None:
        """Fetch the bytes of a digest into the file (mode 0600) of `partial`.

        The file is complete, durable and verified, or absent; it may exceed memory. The transfer
        continues from the bytes of `partial`, which may be from another server, and PeerLost leaves
        them there.

        Raises:
            NotFound: No such chunk.
            StorageFull: The disk is full.
            CorruptData: The bytes changed.
        """
        await self._fill_partial(entry, partial, self._make_transfer(entry), space)

    async def fetch_part(
        self, entry: RegistryEntry, partial: PartialFile, size_bytes: int, *, stall_s: float
    ) -> None:
        """Add one server's bytes of a chunk to `partial`, without checking or committing them.

        It uses a pooled connection and continues from the bytes of `partial`.

        Raises:
            NotFound: No such chunk.
            StorageFull: The disk is full.
            CorruptData: The server's chunk has another size, or it sent fewer bytes.
            PeerLost, DeadlineExceeded: The connection failed, or no byte moved for `stall_s`. The
                received bytes stay, to be continued by this server or another one.
        """
        connect = functools.partial(self._make_session, entry, FILE_TIMEOUT_S, stall_s)
        pool_arguments = self._connection_pool, f"{entry.address} {entry.bulk}"
        await self._fill_partial(
            entry,
            partial,
            FileTransfer(connect, self._part_bytes, *pool_arguments),
            expected_bytes=size_bytes,
        )

    async def _fill_partial(
        self,
        entry: RegistryEntry,
        partial: PartialFile,
        transfer: FileTransfer,
        space: str = WEIGHTS,
        expected_bytes: int | None = None,
    ) -> None:
        """Fetch the missing bytes.

        They are verified and committed unless `expected_bytes` is given: then the caller does so.
        """
        chunks = await self.open_local_store(entry)
        with partial.take_writer() as writer:

            def fill() -> None:
                if chunks is None:
                    transfer.fetch(writer, space, expected_bytes)
                else:
                    for block in chunks.open_space(space).iter_blocks(
                        writer.digest, writer.received_bytes
                    ):
                        if (
                            expected_bytes is not None
                            and writer.received_bytes + len(block) > expected_bytes
                        ):
                            where = str(chunks.directory)
                            raise CorruptData("the peer's chunk has another size", where=where)
                        writer.write(block)
                if expected_bytes is None:
                    writer.verify_and_commit(entry.bulk)

            try:
                await self._run_request(entry, fill, FILE_TIMEOUT_S)
            finally:  # the transfer must not outlive its request
                transfer.stop()

    async def put_file(
        self, entry: RegistryEntry, path: Path, *, deadline_s: float = FILE_TIMEOUT_S
    ) -> str:
        """Store a file's content durably and return its digest; it may exceed memory.

        Raises:
            StorageFull: The disk is full.
            PeerLost: The connection failed.
            BadMessage: The file changed during the transfer.
        """
        chunks = await self.open_local_store(entry)
        if chunks is not None:
            return await self._run_blocking(lambda: chunks.write_file(path), deadline_s)
        transfer = self._make_transfer(entry)
        try:
            return await self._run_request(entry, lambda: transfer.send(path), deadline_s)
        finally:
            transfer.stop()

    def _make_transfer(self, entry: RegistryEntry) -> FileTransfer:
        return FileTransfer(lambda: self._make_session(entry, REQUEST_TIMEOUT_S), self._part_bytes)

    async def open_local_store(self, entry: RegistryEntry) -> ChunkStore | None:
        """Return the served store if it is on this host, else None.

        Raises:
            HandshakeFailed: The entry is not of the process that it names; WrongKeys if that
                persists.
        """
        await self._mesh.verify_peer(entry, bulk=True)
        directory = Path(entry.bulk.partition("#")[2])
        near = entry.host == self._mesh.settings.host and directory.is_absolute()
        if (
            near
            and os.access(directory, os.W_OK)
            and await self._serves_directory(entry, directory)
        ):
            if directory not in self._local_stores:
                self._local_stores[directory] = ChunkStore(
                    directory, self._mesh.clock.wall, self.pending_events
                )
            return self._local_stores[directory]
        return None

    async def _serves_directory(self, entry: RegistryEntry, directory: Path) -> bool:
        """Return True if the process of an entry serves this directory.

        Where other clients may write to the registry, the process itself confirms it over an
        authenticated connection.
        """
        if self._mesh.credentials is None:
            return True
        served = self._served_directories.get(entry.address, b"")
        if not served:

            def ask() -> bytes:
                with self._make_session(entry, REQUEST_TIMEOUT_S) as session:
                    return session.request(DIRECTORY, NO_DIGEST)

            served = await self._run_request(entry, ask, REQUEST_TIMEOUT_S)
            if len(self._served_directories) >= MAX_REMEMBERED_PEERS:
                self._served_directories.clear()
            self._served_directories[entry.address] = served
        return served == os.fsencode(directory)

    def _make_session(
        self, entry: RegistryEntry, deadline_s: float, stall_s: float = math.inf
    ) -> BulkSession:
        place = entry.bulk.partition("#")[0]
        proof = self._authenticator.begin_client_handshake(entry.address, place)
        most, rates = self._max_bytes, self._rates
        return BulkSession(place, proof, deadline_s, most, rates=rates, stall_s=stall_s)

    async def _run_request(
        self, entry: RegistryEntry, work: Callable[[], T], deadline_s: float
    ) -> T:
        """Run a blocking request to a bulk port in a thread.

        WrongKeys: handshakes have failed for longer than a restart explains.
        """
        now = self._mesh.clock.monotonic()
        try:
            result = await self._run_blocking(work, deadline_s)
        except (HandshakeFailed, NotAllowed) as error:
            if self._mesh.credentials is not None:
                # the roles of our keys may have changed
                self._mesh.credentials.mark_suspect(entry.address)
            if isinstance(error, NotAllowed):
                raise
            if len(self._handshakes_failing_since) >= MAX_REMEMBERED_PEERS:
                self._handshakes_failing_since.clear()
            since = self._handshakes_failing_since.setdefault(entry.incarnation, now)
            if now - max(since, self._mesh.redis_silent_at) > HANDSHAKE_FAILURE_LIMIT_S:
                raise WrongKeys(error.message, where=error.where, fix=error.fix) from error
            raise
        self._handshakes_failing_since.pop(entry.incarnation, None)
        return result

    async def _run_blocking(self, work: Callable[[], T], deadline_s: float) -> T:
        return await self._mesh.host.run_blocking(work, deadline_s=deadline_s)
