"""Protocol of a bulk port, and the client side of one connection."""

from __future__ import annotations

import math
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, TypeVar, cast

from meshrl.common.api.transfer.bulk_permissions import SPACES, WEIGHTS
from meshrl.common.base.errors import (
    BadMessage,
    CorruptData,
    DeadlineExceeded,
    HandshakeFailed,
    PeerLost,
)
from meshrl.common.base.errors import from_wire as error_from_wire
from meshrl.common.mesh.wire.frames import unpack_error
from meshrl.common.weights.bulk.channel import (
    MAX_PIECE_BYTES,
    PAUSE,
    UNLIMITED,
    BulkChannel,
    FileTruncated,
    IoSteps,
    RateLimits,
    SealedChannel,
)
from meshrl.common.weights.handshakes.handshake import ClientHandshake

T = TypeVar("T")

# Get a range of a chunk; put a range of one, which is stored with its last range; check that a
# chunk is stored and valid; get the size of an interrupted upload; get the directory of all
# chunks.
GET, PUT, HAS, PARTIAL_SIZE, DIRECTORY = b"G", b"P", b"H", b"R", b"W"
NO_DIGEST = "00" * 32  # the digest in a request without one
# Verb, index of the space, digest, offset, length, size of the whole chunk.
REQUEST_HEADER = struct.Struct("<cB32sQQQ")
RESPONSE_HEADER = struct.Struct("<BQQ")  # OK or FAILED, size of the whole chunk, length of the rest
POSITION = struct.Struct("<Q")
OK, FAILED = 0, 1
HANDSHAKE_FIX = (
    "Run `meshrl keys` to list the admitted keys, and `meshrl down` to stop leftovers of another "
    "mesh. Redis may also have failed to answer the lookup of a key"
)
_POLL_FLAGS = {selectors.EVENT_READ: select.POLLIN, selectors.EVENT_WRITE: select.POLLOUT}


class BulkSession:
    """Blocking connection to a bulk port, for use in a thread; entering it connects.

    Entering raises PeerLost if there is no server, HandshakeFailed if it has other keys. Each
    request has `deadline_s`. A request raises the error that the server reports, or
    DeadlineExceeded, PeerLost, or BadMessage if the response is too large.
    """

    def __init__(
        self,
        endpoint: str,
        handshake: ClientHandshake,
        deadline_s: float,
        max_bytes: int,
        *,
        rates: RateLimits = UNLIMITED,
        stall_s: float = math.inf,
    ) -> None:
        """Create an unopened session.

        Args:
            stall_s: Maximum time without a byte.
        """
        self._endpoint, self._handshake, self._max_bytes = endpoint, handshake, max_bytes
        self._deadline_s, self._rates, self._stall_s = deadline_s, rates, stall_s
        self._aborted = threading.Event()
        # another socket may reuse the descriptor of a closed one
        self._close_lock = threading.Lock()
        self._expires_at = time.monotonic() + deadline_s

    def __enter__(self) -> BulkSession:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> BulkSession:
        """Connect and return itself; the caller closes it."""
        host, _, port = self._endpoint.removeprefix("tcp://").rpartition(":")
        if not host:
            raise PeerLost("it serves chunks to its own host only", where=self._endpoint or "bulk")
        try:
            place = host.strip("[]"), int(port)
            # also limits a connection whose packets are dropped
            timeout = min(self._remaining_s(), self._stall_s)
            self._socket = socket.create_connection(place, timeout=timeout)
        except OSError as error:
            raise PeerLost(
                f"the bulk port is unreachable: {error}", where=self._endpoint
            ) from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setblocking(False)
            self._poll = select.poll()
            self._poll.register(self._socket, 0)
            self._channel = BulkChannel(self._socket, self._rates)
            self._authenticate()
        except BaseException:
            self._socket.close()
            raise
        return self

    def close(self) -> None:
        """Close the connection."""
        with self._close_lock:
            self._socket.close()

    def _authenticate(self) -> None:
        proof = self._handshake
        try:
            self._run_steps(self._channel.send(proof.make_hello()))
            answer = proof.answer_challenge(
                self._run_steps(self._channel.receive_exactly(proof.challenge_bytes))
            )
        except TimeoutError:
            raise DeadlineExceeded("the bulk port does not answer", where=self._endpoint) from None
        except OSError as error:
            raise HandshakeFailed(
                f"wrong keys: the bulk port rejects this process: {error}",
                where=self._endpoint,
                fix=HANDSHAKE_FIX,
            ) from error
        if answer is None:
            raise HandshakeFailed(
                "wrong keys: another program may have taken the bulk port",
                where=self._endpoint,
                fix=HANDSHAKE_FIX,
            )
        with self._request_deadline():
            self._send(answer)
        if proof.ciphers is not None:
            self._channel = SealedChannel(self._socket, *proof.ciphers, self._rates)

    def abort(self) -> None:
        """Abort a request of another thread, which raises PeerLost."""
        self._aborted.set()
        with self._close_lock, suppress(OSError):  # it is no longer connected
            self._socket.shutdown(socket.SHUT_RDWR)

    def request(
        self,
        verb: bytes,
        digest: str,
        content: bytes | bytearray | memoryview = b"",
        *,
        space: str = WEIGHTS,
    ) -> bytes:
        """Return the server's response about a whole chunk."""
        size = memoryview(content).nbytes
        with self._open_request(verb, digest, 0, size, size, space):
            self._send(content)
            return self._receive_exactly(self._receive_header()[1])

    def fetch_chunk(self, digest: str, space: str = WEIGHTS) -> bytes:
        """Return the bytes of a whole chunk."""
        with self._open_request(GET, digest, 0, self._max_bytes, 0, space):
            size, length = self._receive_header()
            if size > self._max_bytes:
                raise BadMessage(
                    f"an answer has {size} bytes, over the limit", where=self._endpoint
                )
            return self._receive_exactly(length)

    def fetch_range(
        self,
        digest: str,
        offset: int,
        length: int,
        on_bytes: Callable[[memoryview], None],
        expected_bytes: int | None = None,
        space: str = WEIGHTS,
    ) -> int:
        """Pass up to `length` bytes from `offset` to `on_bytes` as they arrive; return the chunk's
        size.

        Args:
            expected_bytes: Size of the chunk; CorruptData if it differs, before any byte is passed.
        """
        with self._open_request(GET, digest, offset, length, 0, space):
            size, remaining = self._receive_header()
            if remaining > length:
                raise BadMessage(
                    f"{remaining} bytes arrived instead of {length}", where=self._endpoint
                )
            if expected_bytes is not None and (
                size != expected_bytes or remaining != min(length, expected_bytes - offset)
            ):
                description = (
                    f"{remaining} bytes from {offset} of {size} arrived, instead of {length} of "
                    f"{expected_bytes}"
                )
                raise CorruptData(
                    f"the peer's chunk has another size: {description}", where=self._endpoint
                )
            room = memoryview(bytearray(min(remaining, MAX_PIECE_BYTES)))
            while remaining:
                received = self._run_steps(self._channel.receive(room[: min(remaining, len(room))]))
                on_bytes(room[:received])
                remaining -= received
            return size

    def put_range(self, digest: str, file: BinaryIO, offset: int, length: int, size: int) -> None:
        """Send a range of a file of `size` bytes. BadMessage: the file became shorter."""
        with self._open_request(PUT, digest, offset, length, size):
            try:
                self._run_steps(self._channel.send_file(file.fileno(), offset, length))
            except FileTruncated as error:
                raise BadMessage(str(error), where=file.name) from None
            self._receive_exactly(self._receive_header()[1])

    @contextmanager
    def _open_request(
        self, verb: bytes, digest: str, offset: int, length: int, size: int, space: str = WEIGHTS
    ) -> Iterator[None]:
        about = bytes.fromhex(digest), offset, length, size
        with self._request_deadline():
            self._send(REQUEST_HEADER.pack(verb, SPACES.index(space), *about))
            yield

    @contextmanager
    def _request_deadline(self) -> Iterator[None]:
        """Set the deadline of a request or handshake, and translate socket errors."""
        self._expires_at = time.monotonic() + self._deadline_s
        try:
            yield
        except TimeoutError:
            raise DeadlineExceeded("a transfer took too long", where=self._endpoint) from None
        except OSError as error:
            raise PeerLost(f"a transfer was interrupted: {error}", where=self._endpoint) from error

    def _receive_header(self) -> tuple[int, int]:
        status, size, length = RESPONSE_HEADER.unpack(self._receive_exactly(RESPONSE_HEADER.size))
        if status != OK:
            error = self._receive_exactly(length)
            raise error_from_wire(*unpack_error(error), where=self._endpoint)
        return size, length

    def _send(self, content: bytes | bytearray | memoryview) -> None:
        self._run_steps(self._channel.send(content))

    def _receive_exactly(self, length: int) -> bytes:
        if length > self._max_bytes:
            raise BadMessage(f"an answer has {length} bytes, over the limit", where=self._endpoint)
        return self._run_steps(self._channel.receive_exactly(length))

    def _run_steps(self, steps: IoSteps[T]) -> T:
        """Run the steps and return their result; TimeoutError after the deadline or a stall."""
        try:
            while True:
                if (step := next(steps)) == PAUSE:
                    self._aborted.wait(min(self._channel.pause_s, self._remaining_s()))
                    continue
                self._poll.modify(self._socket, _POLL_FLAGS[step])
                if not self._poll.poll(1000 * min(self._remaining_s(), self._stall_s)):
                    raise TimeoutError
        except StopIteration as done:
            return cast(T, done.value)

    def _remaining_s(self) -> float:
        remaining_s = self._expires_at - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("a transfer took too long", where=self._endpoint)
        return remaining_s
