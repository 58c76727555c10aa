"""The bulk port for large bytes beside the control traffic: chunks by digest over TCP, or straight
from the file on the same host.

Both ends of a connection prove first that they know the mesh's secret (`handshake.py`). Then a
request is a verb, a digest and a length; an answer a status and a length; then bytes. The server
is one thread that never waits for one client, so a CANCEL on the control port never waits behind a
chunk. A client on the same host reads and writes the files themselves.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import xxhash

from common.errors import (
    BadMessage,
    ConfigError,
    Damaged,
    MeshError,
    NotFound,
    Refused,
    to_wire,
)
from common.secret import derived
from common.settings import MeshSettings, advertised_host
from common.wire.bulk_session import (
    ANSWER,
    FAILED,
    GET,
    HAS,
    OK,
    PIECE_BYTES,
    PUT,
    REQUEST,
    Session,
)
from common.wire.chunks import ChunkStore, Scratch, digest_of
from common.wire.frames import pack_error
from common.wire.handshake import HELLO, TAG_BYTES, Answering

if TYPE_CHECKING:
    from common.process.host import Host
    from common.runtime.mesh import Mesh
    from common.state.registry import Entry

__all__ = ["BulkClient", "BulkServer", "ChunkStore"]

T = TypeVar("T")
LARGEST_BYTES = 4 << 30  # most in one transfer, at either end
IDLE_S = 60.0
TURN_S = 0.2  # how often the thread looks whether it should end
PROOF_S = 5.0  # in which a client has proved who it is: one round trip, on a busy host too
CONNECTIONS = 256
STRANGERS = 64  # connections without a proof yet; the oldest makes room for the next
DEADLINE_S = 120.0

_Steps = Generator[int, None, None]  # yields the selectors.EVENT_* that it waits for


def bulk_key(settings: MeshSettings) -> bytes:
    """The key of a mesh's bulk ports; without a secret it is one that everybody knows."""
    return derived(settings.secret, "bulk")


class BulkServer:
    """Serves a ChunkStore to who knows `key`. `bind` and `advertise` as for the transport; without
    `bind` there is no port, and only clients of this host find the chunks.
    """

    def __init__(
        self,
        chunks: ChunkStore,
        host: Host,
        bind: str,
        advertise: str = "",
        *,
        key: bytes,
        largest_bytes: int = LARGEST_BYTES,
    ) -> None:
        self._chunks, self._key, self._largest_bytes = chunks, key, largest_bytes
        chunks.directory.mkdir(parents=True, exist_ok=True)
        self._connections: dict[socket.socket, _Connection] = {}
        self._closing = False
        if not bind:
            self.address = chunks.local_address
            return
        interface, _, port = bind.removeprefix("tcp://").rpartition(":")
        where = interface.replace("*", ""), 0 if port == "*" else int(port)
        try:
            self._listener = socket.create_server(where, backlog=CONNECTIONS)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {bind}: {error}",
                where="mesh.bind",
                fix="Take an address of this host, and * or a free port behind it",
            ) from error
        self._listener.setblocking(False)
        bound = self._listener.getsockname()
        shown = advertised_host(advertise) or bound[0]
        self._place = f"tcp://{shown}:{bound[1]}"
        self.address = f"{self._place}#{chunks.directory}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = host.every(0.0, self._turn, "bulk")

    @property
    def connections(self) -> int:
        """How many are open now, those without a proof among them."""
        return len(self._connections)

    def close(self) -> None:
        """Stops the server at its thread's next look; transfers under way break off."""
        self._closing = True

    def _turn(self) -> bool:
        if self._closing:
            for connection in list(self._connections.values()):
                self._end(connection)
            self._selector.close()
            self._listener.close()
            return False
        for key, _ in self._selector.select(TURN_S):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._advance(key.data)
        now = time.monotonic()
        for connection in [c for c in self._connections.values() if now > c.ends]:
            self._end(connection)
        return True

    def _accept(self) -> None:
        with suppress(OSError):  # the client has gone again, or there are no descriptors left
            accepted, _ = self._listener.accept()
            strangers = [c for c in self._connections.values() if not c.proven]
            if len(self._connections) - len(strangers) >= CONNECTIONS:
                accepted.close()
                return
            if len(strangers) >= STRANGERS:
                self._end(strangers[0])
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            proof = Answering(self._key, self._place)
            connection = _Connection(accepted, proof, self._chunks, self._largest_bytes)
            self._connections[accepted] = connection
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _advance(self, connection: _Connection) -> None:
        try:
            wanted = next(connection.steps)
        except (StopIteration, OSError):
            self._end(connection)
            return
        if connection.proven:
            connection.ends = time.monotonic() + IDLE_S
        if wanted != connection.waits_for:
            connection.waits_for = wanted
            self._selector.modify(connection.socket, wanted, connection)

    def _end(self, connection: _Connection) -> None:
        connection.steps.close()
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self._connections[connection.socket]


class _Connection:
    """One client: a generator that goes on whenever its socket is ready."""

    def __init__(
        self, connected: socket.socket, proof: Answering, chunks: ChunkStore, largest_bytes: int
    ) -> None:
        self.socket = connected
        self.proven = False
        self.ends = time.monotonic() + PROOF_S
        self._proof = proof
        self.waits_for = selectors.EVENT_READ
        self._chunks, self._largest_bytes = chunks, largest_bytes
        self.steps = self._serve()

    def _serve(self) -> _Steps:
        challenge = self._proof.challenge((yield from self._whole(HELLO.size)))
        if challenge is None:
            return
        yield from self._send_all(challenge)
        self.proven = self._proof.proven((yield from self._whole(TAG_BYTES)))
        if not self.proven:
            return
        while True:
            verb, digest, length = REQUEST.unpack((yield from self._whole(REQUEST.size)))
            if length > self._largest_bytes:
                return
            try:
                if verb == GET:
                    yield from self._get(digest.hex())
                elif verb == PUT:
                    yield from self._put(digest.hex(), length)
                elif verb == HAS:
                    yield from self._has(digest.hex())
                else:
                    return
            except MeshError as error:
                text = pack_error(*to_wire(error))
                yield from self._send_all(ANSWER.pack(FAILED, len(text)) + text)

    def _get(self, digest: str) -> _Steps:
        path = self._chunks.path(digest)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise NotFound(f"no chunk {digest}", where=str(self._chunks.directory)) from None
        with file:
            size = os.fstat(file.fileno()).st_size
            yield from self._send_all(ANSWER.pack(OK, size))
            offset = 0
            while offset < size:
                yield selectors.EVENT_WRITE
                piece = min(PIECE_BYTES, size - offset)
                with suppress(BlockingIOError):
                    sent = os.sendfile(self.socket.fileno(), file.fileno(), offset, piece)
                    if sent == 0:
                        raise ConnectionError("the file became shorter")
                    offset += sent

    def _has(self, digest: str) -> _Steps:
        """Whether the chunk is there as it was written, for a client that has its bytes. It is
        read in pieces, so that the others have their turns.
        """
        hashed, there = xxhash.xxh3_128(), False
        with suppress(FileNotFoundError), self._chunks.path(digest).open("rb") as file:
            there = True
            while piece := file.read(PIECE_BYTES):
                hashed.update(piece)
                yield selectors.EVENT_WRITE
        whole = hashed.hexdigest() == digest
        if there and not whole:
            self._chunks.whole(digest)
        yield from self._answer(bytes([whole and self._chunks.touch(digest)]))

    def _put(self, digest: str, length: int) -> _Steps:
        scratch: Scratch | None = None
        trouble: MeshError | None = None
        hashed, left = xxhash.xxh3_128(), length
        try:
            try:
                scratch = self._chunks.scratch(digest)
            except MeshError as error:
                trouble = error
            while left:
                piece = yield from self._receive(min(PIECE_BYTES, left))
                if not piece:
                    raise ConnectionError("the client broke off")
                left -= len(piece)
                hashed.update(piece)
                if scratch is not None and trouble is None:
                    try:
                        scratch.write(piece)
                    except MeshError as error:  # take the rest, so that the client can read why
                        trouble = error
            if trouble is not None:
                raise trouble
            if hashed.hexdigest() != digest:
                raise BadMessage(f"what arrived is not {digest}", where=str(self._chunks.directory))
            if scratch is not None:
                scratch.commit()  # over what is there, which may be damaged
        finally:
            if scratch is not None:
                scratch.discard()
        yield from self._answer(b"")

    def _answer(self, content: bytes) -> _Steps:
        yield from self._send_all(ANSWER.pack(OK, len(content)) + content)

    def _send_all(self, content: bytes) -> _Steps:
        view = memoryview(content)
        while view:
            yield selectors.EVENT_WRITE
            with suppress(BlockingIOError):
                view = view[self.socket.send(view) :]

    def _whole(self, size: int) -> Generator[int, None, bytes]:
        """The next `size` bytes."""
        received = b""
        while len(received) < size:
            more = yield from self._receive(size - len(received))
            if not more:
                raise ConnectionError("the client closed the connection")
            received += more
        return received

    def _receive(self, most: int) -> Generator[int, None, bytes]:
        while True:
            yield selectors.EVENT_READ
            with suppress(BlockingIOError):
                return self.socket.recv(most)


class BulkClient:
    """Gets and puts chunks of whoever serves them; every transfer runs off the loop and has a
    deadline.
    """

    def __init__(self, mesh: Mesh, *, largest_bytes: int = LARGEST_BYTES) -> None:
        self._mesh, self._largest_bytes = mesh, largest_bytes
        self._key = bulk_key(mesh.settings)
        self.untold: deque[tuple[Path, Path]] = deque()  # see ChunkStore

    async def get(self, entry: Entry, digest: str, *, deadline_s: float = DEADLINE_S) -> bytes:
        """The bytes of `digest`, checked. NotFound, PeerLost, Damaged when they were changed."""
        chunks = self._local(entry)
        if chunks is not None:
            return await self._off_loop(lambda: chunks.read(digest), deadline_s)

        def fetch() -> bytes:
            with self._session(entry, deadline_s) as session:
                content = session.ask(GET, digest)
            if digest_of(content) != digest:
                raise Damaged(f"chunk {digest} arrived changed", where=entry.bulk)
            return content

        return await self._off_loop(fetch, deadline_s)

    async def put(
        self, entry: Entry, content: bytes | memoryview, *, deadline_s: float = DEADLINE_S
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
        chunks = self._local(entry)
        if chunks is not None:
            return await self._off_loop(lambda: chunks.write(content), deadline_s)

        def send() -> str:
            digest = digest_of(content)
            with self._session(entry, deadline_s) as session:
                if session.ask(HAS, digest) != b"\x01":
                    session.ask(PUT, digest, content)
            return digest

        return await self._off_loop(send, deadline_s)

    def _local(self, entry: Entry) -> ChunkStore | None:
        directory = Path(entry.bulk.partition("#")[2])
        near = entry.host == self._mesh.settings.host and directory.is_absolute()
        if near and os.access(directory, os.W_OK):
            chunks = ChunkStore(directory, self._mesh.clock.wall)
            chunks.untold = self.untold
            return chunks
        return None

    def _session(self, entry: Entry, deadline_s: float) -> Session:
        return Session(entry.bulk, self._key, deadline_s, self._largest_bytes)

    async def _off_loop(self, work: Callable[[], T], deadline_s: float) -> T:
        return await self._mesh.host.run_blocking(work, deadline_s=deadline_s)
