"""What travels at a bulk port, and one connection to it as a client has it."""

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

from meshrl.common.api.transfer.bulk import SPACES, WEIGHTS
from meshrl.common.base.errors import (
    BadMessage,
    Damaged,
    DeadlineExceeded,
    HandshakeFailed,
    PeerLost,
)
from meshrl.common.base.errors import from_wire as error_from_wire
from meshrl.common.mesh.wire.frames import unpack_error
from meshrl.common.weights.bulk.channel import (
    PAUSE,
    PIECE_BYTES,
    UNLIMITED,
    BulkChannel,
    FileShorter,
    Rates,
    SealedChannel,
    Steps,
)
from meshrl.common.weights.handshakes.handshake import ClientHandshake

T = TypeVar("T")

# Part of a chunk; part of one to be stored, which is there once its last part has come; whether a
# chunk is there as it was written; how much is there of one whose connection broke; in which
# directory all of them are.
GET, PUT, HAS, REST, WHERE = b"G", b"P", b"H", b"R", b"W"
NO_CHUNK = "00" * 32  # the digest in a question that is about none
# Verb, number of the space, digest, offset, length, size of the whole chunk.
REQUEST = struct.Struct("<cB32sQQQ")
ANSWER = struct.Struct("<BQQ")  # OK or FAILED, size of the whole chunk, length of what follows
POSITION = struct.Struct("<Q")
OK, FAILED = 0, 1
FIX = (
    "It is of another mesh (`meshrl down` stops what is left), one of the keys was revoked "
    "(`meshrl keys` lists whose are let in), or Redis has just not answered whose they are"
)
_POLLED = {selectors.EVENT_READ: select.POLLIN, selectors.EVENT_WRITE: select.POLLOUT}


class BulkSession:
    """A connection to the bulk port at `place`, blocking; used in a thread. To enter it is to
    connect: PeerLost when there is no server, HandshakeFailed when it has other keys.

    Each request has `deadline_s`. It raises the error that the server reports; DeadlineExceeded,
    PeerLost, BadMessage when it answers too much.
    """

    def __init__(
        self,
        place: str,
        proof: ClientHandshake,
        deadline_s: float,
        largest_bytes: int,
        *,
        rates: Rates = UNLIMITED,
        stall_s: float = math.inf,
    ) -> None:
        """`stall_s`: how long nothing may move."""
        self._place, self._proof, self._largest_bytes = place, proof, largest_bytes
        self._deadline_s, self._rates, self._stall_s = deadline_s, rates, stall_s
        self._broken = threading.Event()
        self._closing = threading.Lock()  # the number of a closed socket may be another's at once
        self._ends = time.monotonic() + deadline_s

    def __enter__(self) -> BulkSession:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> BulkSession:
        """Connects, and returns itself; whoever opened it closes it."""
        host, _, port = self._place.removeprefix("tcp://").rpartition(":")
        if not host:
            raise PeerLost("it serves chunks to its own host only", where=self._place or "bulk")
        try:
            place = host.strip("[]"), int(port)
            timeout = min(self._left(), self._stall_s)  # on a way that drops all, too
            self._socket = socket.create_connection(place, timeout=timeout)
        except OSError as error:
            raise PeerLost(f"no bulk port: {error}", where=self._place) from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setblocking(False)
            self._poll = select.poll()
            self._poll.register(self._socket, 0)
            self._channel = BulkChannel(self._socket, self._rates)
            self._prove()
        except BaseException:
            self._socket.close()
            raise
        return self

    def close(self) -> None:
        """Ends the connection."""
        with self._closing:
            self._socket.close()

    def _prove(self) -> None:
        proof = self._proof
        try:
            self._run(self._channel.send(proof.hello()))
            answer = proof.proof(self._run(self._channel.whole(proof.challenge_bytes)))
        except TimeoutError:
            raise DeadlineExceeded("a bulk port says nothing", where=self._place) from None
        except OSError as error:
            raise HandshakeFailed(
                f"keys? A bulk port does not let this process in: {error}",
                where=self._place,
                fix=FIX,
            ) from error
        if answer is None:
            raise HandshakeFailed(
                "keys? Another program has taken a bulk port", where=self._place, fix=FIX
            )
        with self._deadline():
            self._send(answer)
        if proof.ciphers is not None:
            self._channel = SealedChannel(self._socket, *proof.ciphers, self._rates)

    def break_off(self) -> None:
        """Ends what another thread does here, which raises PeerLost."""
        self._broken.set()
        with self._closing, suppress(OSError):  # it is not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def ask(
        self,
        verb: bytes,
        digest: str,
        content: bytes | bytearray | memoryview = b"",
        *,
        space: str = WEIGHTS,
    ) -> bytes:
        """What the server answers about a whole chunk."""
        size = memoryview(content).nbytes
        with self._request(verb, digest, 0, size, size, space):
            self._send(content)
            return self._whole(self._answer()[1])

    def chunk(self, digest: str, space: str = WEIGHTS) -> bytes:
        """The bytes of a whole chunk."""
        with self._request(GET, digest, 0, self._largest_bytes, 0, space):
            size, length = self._answer()
            if size > self._largest_bytes:
                raise BadMessage(f"an answer of {size} bytes", where=self._place)
            return self._whole(length)

    def get(
        self,
        digest: str,
        offset: int,
        length: int,
        take: Callable[[memoryview], None],
        whole: int | None = None,
        space: str = WEIGHTS,
    ) -> int:
        """Hands on up to `length` bytes from `offset`, as they come; the size of the chunk.
        `whole`: what that must be, else Damaged, before anything is handed on.
        """
        with self._request(GET, digest, offset, length, 0, space):
            size, left = self._answer()
            if left > length:
                raise BadMessage(f"{left} bytes for {length}", where=self._place)
            if whole is not None and (size != whole or left != min(length, whole - offset)):
                said = f"{left} bytes from {offset} of {size}, for {length} of {whole}"
                raise Damaged(f"a chunk has another size there: {said}", where=self._place)
            room = memoryview(bytearray(min(left, PIECE_BYTES)))
            while left:
                received = self._run(self._channel.receive(room[: min(left, len(room))]))
                take(room[:received])
                left -= received
            return size

    def put(self, digest: str, file: BinaryIO, offset: int, length: int, size: int) -> None:
        """Sends the part of a file of `size` bytes. BadMessage: the file became shorter."""
        with self._request(PUT, digest, offset, length, size):
            try:
                self._run(self._channel.send_file(file.fileno(), offset, length))
            except FileShorter as error:
                raise BadMessage(str(error), where=file.name) from None
            self._whole(self._answer()[1])

    @contextmanager
    def _request(
        self, verb: bytes, digest: str, offset: int, length: int, size: int, space: str = WEIGHTS
    ) -> Iterator[None]:
        about = bytes.fromhex(digest), offset, length, size
        with self._deadline():
            self._send(REQUEST.pack(verb, SPACES.index(space), *about))
            yield

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        """Of a request or a proof; what the trouble of a socket means."""
        self._ends = time.monotonic() + self._deadline_s
        try:
            yield
        except TimeoutError:
            raise DeadlineExceeded("a transfer took too long", where=self._place) from None
        except OSError as error:
            raise PeerLost(f"a transfer broke off: {error}", where=self._place) from error

    def _answer(self) -> tuple[int, int]:
        status, size, length = ANSWER.unpack(self._whole(ANSWER.size))
        if status != OK:
            error = self._whole(length)
            raise error_from_wire(*unpack_error(error), where=self._place)
        return size, length

    def _send(self, content: bytes | bytearray | memoryview) -> None:
        self._run(self._channel.send(content))

    def _whole(self, length: int) -> bytes:
        if length > self._largest_bytes:
            raise BadMessage(f"an answer of {length} bytes", where=self._place)
        return self._run(self._channel.whole(length))

    def _run(self, steps: Steps[T]) -> T:
        """What the steps come to; TimeoutError after the deadline, or when nothing moves."""
        try:
            while True:
                if (wanted := next(steps)) == PAUSE:
                    self._broken.wait(min(self._channel.pause_s, self._left()))
                    continue
                self._poll.modify(self._socket, _POLLED[wanted])
                if not self._poll.poll(1000 * min(self._left(), self._stall_s)):
                    raise TimeoutError
        except StopIteration as done:
            return cast(T, done.value)

    def _left(self) -> float:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("a transfer took too long", where=self._place)
        return left
