"""Server side of one bulk connection: a generator that advances when its socket is ready."""

from __future__ import annotations

import os
import queue
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from meshrl.common.api.transfer import bulk_permissions
from meshrl.common.base.digest import Hasher
from meshrl.common.base.errors import BadMessage, MeshError, NotAllowed, Refused, to_wire
from meshrl.common.mesh.wire.frames import pack_error
from meshrl.common.weights.bulk.authenticators import BulkAuthenticator
from meshrl.common.weights.bulk.channel import (
    MAX_PIECE_BYTES,
    UNLIMITED,
    BulkChannel,
    IoSteps,
    RateLimits,
    SealedChannel,
)
from meshrl.common.weights.bulk.session import (
    DIRECTORY,
    FAILED,
    GET,
    HAS,
    OK,
    PARTIAL_SIZE,
    POSITION,
    PUT,
    REQUEST_HEADER,
    RESPONSE_HEADER,
)
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.chunks.partial_file import ParkedUploads, PartialFile

if TYPE_CHECKING:
    from meshrl.common.mesh.process.host import Host


POLL_S = 0.5  # between checks whether a thread should end

K = TypeVar("K")
BlockingTask = Callable[[], object]
_MAX_FILE_BYTES = 1 << 62  # of a file; larger offsets are invalid
_UPLOAD_VERBS = (PUT, HAS, PARTIAL_SIZE)  # requests of a client that puts a chunk
_VERBS = (GET, DIRECTORY, *_UPLOAD_VERBS)
KEY_LOOKUP, DISK_WRITE = (0, -1)  # in place of a socket event: a background task, and its runner


class BackgroundTasks(Generic[K]):
    """Background tasks on one thread, which starts with the first task.

    `wakeup_reader` becomes readable when `take_results` has results. `K` is the type of clients.
    """

    def __init__(self, host: Host, name: str) -> None:
        self._host, self._name = host, name
        self.wakeup_reader, self._wakeup_writer = socket.socketpair()
        for end in (self.wakeup_reader, self._wakeup_writer):
            end.setblocking(False)
        self._queue: queue.SimpleQueue[tuple[K, BlockingTask]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[K, object]] = queue.SimpleQueue()
        self._started = self._closing = False

    def submit(self, client: K, task: BlockingTask) -> None:
        """Queue a task."""
        self._queue.put((client, task))
        if not self._started:
            self._started = True
            self._thread = self._host.run_periodically(0.0, self._run_next, self._name)

    def take_results(self) -> list[tuple[K, object]]:
        """Return finished tasks: the client, and the result or its MeshError."""
        with suppress(BlockingIOError):
            self.wakeup_reader.recv(4096)
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._results.get_nowait())
        return found

    def close(self) -> None:
        """Stop the thread within `POLL_S`."""
        self._closing = True
        if not self._started:
            self._close_sockets()

    def _close_sockets(self) -> None:
        self.wakeup_reader.close()
        self._wakeup_writer.close()

    def _run_next(self) -> bool:
        if self._closing:
            self._close_sockets()
            return False
        with suppress(queue.Empty):
            client, errand = self._queue.get(timeout=POLL_S)
            try:
                self._results.put((client, errand()))
            except Exception as error:  # its client must not wait forever
                typed = error if isinstance(error, MeshError) else MeshError(repr(error))
                self._results.put((client, typed))
            with suppress(BlockingIOError):  # an earlier wake-up is still unread
                self._wakeup_writer.send(b"\0")
        return True


class BulkPortState:
    """State shared by all connections of a port."""

    def __init__(
        self,
        chunks: ChunkStore,
        parked: ParkedUploads,
        largest_bytes: int,
        rates: RateLimits = UNLIMITED,
        *,
        takes: bool = True,
    ) -> None:
        """Create the state.

        Args:
            largest_bytes: Limit of one put request.
            takes: Accept uploads.
        """
        self.chunks, self.parked_uploads, self.max_bytes = chunks, parked, largest_bytes
        self.rates, self.accepts_uploads = rates, takes
        self.sent_bytes = 0  # of chunks
        # for bytes that are not retained in memory
        self.receive_buffer = memoryview(bytearray(MAX_PIECE_BYTES))


class ServedConnection:
    """Server side of one client's connection.

    The caller that runs `io_steps` sets `expires_at`, the deadline of the connection. When
    `io_steps` yields KEY_LOOKUP or DISK_WRITE, the caller runs `task` and sets `task_result`. After
    PAUSE it continues in `pause_s`.
    """

    def __init__(
        self,
        connected_socket: socket.socket,
        origin: str,
        authenticator: BulkAuthenticator,
        endpoint: str,
        port_state: BulkPortState,
    ) -> None:
        self.socket, self.origin = connected_socket, origin
        self.has_sent_key = False  # the client has sent its public key
        self.user = ""  # user of that key
        self.task: BlockingTask = lambda: None
        self.task_result: object = None
        self.is_authenticated = self.is_closed = False
        self.expires_at = 0.0
        self.awaited_event = selectors.EVENT_READ
        self._authenticator, self._handshake = (
            authenticator,
            authenticator.begin_server_handshake(endpoint),
        )
        self._port_state, self._chunks, self._parked_uploads = (
            port_state,
            port_state.chunks,
            port_state.parked_uploads,
        )
        self._receive_buffer, self._max_bytes = port_state.receive_buffer, port_state.max_bytes
        self._channel = BulkChannel(connected_socket, port_state.rates)
        self._upload: PartialFile | None = None  # a chunk that this client uploads in parts
        self.io_steps = self._serve()

    @property
    def pause_s(self) -> float:
        """Seconds to pause."""
        return self._channel.pause_s

    def _serve(self) -> IoSteps[None]:
        yield from self._authenticate()
        if not self.is_authenticated:
            return
        try:
            while (yield from self._handle_request()):
                pass
        finally:
            if self._upload is not None:
                self._parked_uploads.park(self.user, self._upload)

    def _authenticate(self) -> IoSteps[None]:
        proof = self._handshake
        public = proof.read_client_key(
            (yield from self._channel.receive_exactly(proof.hello_bytes))
        )
        if public is None:
            return
        self.has_sent_key = True
        user = yield from self._run_task(
            KEY_LOOKUP, lambda: self._authenticator.identify_user(public)
        )
        if not isinstance(user, str):  # the key is unknown, or Redis did not answer
            return
        self.user = user
        yield from self._channel.send(proof.make_challenge())
        self.is_authenticated = proof.verify_proof(
            (yield from self._channel.receive_exactly(proof.proof_bytes))
        )
        if self.is_authenticated and proof.ciphers is not None:
            self._channel = SealedChannel(self.socket, *proof.ciphers, self._port_state.rates)

    def _handle_request(self) -> IoSteps[bool]:
        request = REQUEST_HEADER.unpack(
            (yield from self._channel.receive_exactly(REQUEST_HEADER.size))
        )
        verb, number, digest, offset, length, size = request
        if (
            verb not in _VERBS
            or offset + length > _MAX_FILE_BYTES
            or number >= len(bulk_permissions.SPACES)
        ):
            return False
        space = bulk_permissions.SPACES[number]
        if verb == PUT and length > self._max_bytes:
            return False
        try:
            self._authenticator.check_allowed(
                self.user,
                bulk_permissions.put_right(space)
                if verb in _UPLOAD_VERBS
                else bulk_permissions.GET,
            )
            if (verb in _UPLOAD_VERBS or space) and not self._port_state.accepts_uploads:
                raise NotAllowed(
                    "this server accepts no chunks", fix="Send chunks to the weight store"
                )
            self._chunks = (
                self._port_state.chunks.open_space(space) if space else self._port_state.chunks
            )
            if verb == GET:
                yield from self._handle_get(digest.hex(), offset, length)
            elif verb == PUT:
                yield from self._handle_put(digest.hex(), offset, length, size)
            elif verb == HAS:
                yield from self._handle_has(digest.hex())
            elif verb == PARTIAL_SIZE:
                # The client continues an upload of a broken connection.
                self._discard_upload()
                self._upload = self._parked_uploads.take(self.user, digest.hex())
                position = self._upload.received_bytes if self._upload is not None else 0
                yield from self._send_response(POSITION.pack(position))
            else:
                yield from self._send_response(os.fsencode(self._port_state.chunks.directory))
        except MeshError as error:
            self._discard_upload()
            text = pack_error(*to_wire(error))
            yield from self._channel.send(RESPONSE_HEADER.pack(FAILED, 0, len(text)))
            yield from self._channel.send(text)
            return not isinstance(error, NotAllowed)
        return True

    def _handle_get(self, digest: str, offset: int, max_bytes: int) -> IoSteps[None]:
        with self._chunks.open(digest) as file:
            size = os.fstat(file.fileno()).st_size
            length = max(0, min(size, offset + max_bytes) - offset)
            yield from self._channel.send(RESPONSE_HEADER.pack(OK, size, length))
            before = self._channel.sent_file_bytes
            try:
                yield from self._channel.send_file(file.fileno(), offset, length)
            finally:
                self._port_state.sent_bytes += self._channel.sent_file_bytes - before

    def _handle_has(self, digest: str) -> IoSteps[None]:
        """Respond 1 if the chunk is stored and valid, for a client that has its bytes.

        It is read in pieces, so that other connections continue.
        """
        is_valid = self._chunks.is_verified(digest)
        if not is_valid:
            hashed, there = Hasher(), False
            with suppress(FileNotFoundError), self._chunks.chunk_path(digest).open("rb") as file:
                there = True
                while piece := file.read(MAX_PIECE_BYTES):
                    hashed.update(piece)
                    yield selectors.EVENT_WRITE
            is_valid = hashed.hexdigest() == digest
            if there and not is_valid:
                self._chunks.is_valid(digest)
        yield from self._send_response(bytes([is_valid and self._chunks.mark_written(digest)]))

    def _handle_put(self, digest: str, offset: int, length: int, size: int) -> IoSteps[None]:
        failure: MeshError | None = None
        partial: PartialFile | None = None
        try:
            if offset == 0:
                self._discard_upload()
                self._upload = PartialFile.for_chunk(self._chunks, digest)
            partial = self._upload
            if partial is None or (partial.digest, partial.received_bytes) != (digest, offset):
                raise Refused(
                    f"{digest} has not arrived up to byte {offset}", fix="Start the upload again"
                )
            if offset + length > size:
                raise BadMessage(
                    f"the range {offset} to {offset + length} of {size} bytes is invalid"
                )
        except MeshError as error:
            failure = error
        while length:
            received = yield from self._channel.receive(
                self._receive_buffer[: min(len(self._receive_buffer), length)]
            )
            length -= received
            if failure is None and partial is not None:
                try:
                    partial.write(self._receive_buffer[:received])
                except (
                    MeshError
                ) as error:  # receive the rest, so that the client can read the error
                    failure = error
        if failure is not None:
            raise failure
        assert partial is not None
        if partial.received_bytes == size:
            if not partial.is_valid:
                raise BadMessage(
                    f"the received content does not match {digest}",
                    where=str(self._chunks.directory),
                )
            done = yield from self._run_task(DISK_WRITE, partial.commit)  # replaces a corrupt file
            if isinstance(done, MeshError):
                raise done
            self._discard_upload()
        yield from self._send_response(b"")

    def _run_task(self, runner: int, task: BlockingTask) -> IoSteps[object]:
        self.task = task
        yield runner
        return self.task_result

    def _discard_upload(self) -> None:
        if self._upload is not None:
            self._upload.discard()
            self._upload = None

    def _send_response(self, content: bytes) -> IoSteps[None]:
        yield from self._channel.send(RESPONSE_HEADER.pack(OK, 0, len(content)))
        yield from self._channel.send(content)
