"""What travels at a bulk port, and one connection to it as a client has it."""

from __future__ import annotations

import socket
import struct
import time

from common.errors import BadMessage, DeadlineExceeded, PeerLost
from common.errors import from_wire as error_from_wire
from common.wire.frames import unpack_error
from common.wire.handshake import CHALLENGE, Asking

GET, PUT, HAS = b"G", b"P", b"H"
REQUEST = struct.Struct("<c16sQ")  # verb, digest, length of what follows
ANSWER = struct.Struct("<BQ")  # OK or FAILED, length of what follows
OK, FAILED = 0, 1
PIECE_BYTES = 1 << 20  # what one connection may move before the others have their turn


class Session:
    """A connection to a BulkServer that knows `key`, blocking; used in a thread. To enter it is to
    connect: PeerLost when there is no server, or one that does not belong to the mesh.
    """

    def __init__(self, address: str, key: bytes, deadline_s: float, largest_bytes: int) -> None:
        self._address, self._largest_bytes = address.partition("#")[0], largest_bytes
        self._asking = Asking(key, self._address)
        self._proof = b""  # goes out with the first request
        self._ends = time.monotonic() + deadline_s

    def __enter__(self) -> Session:
        host, _, port = self._address.removeprefix("tcp://").rpartition(":")
        if not host:
            raise PeerLost("it serves chunks to its own host only", where=self._address or "bulk")
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=self._left())
        except OSError as error:
            raise PeerLost(f"no bulk port: {error}", where=self._address) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._socket.sendall(self._asking.hello())
            proof = self._asking.proof(self._receive(CHALLENGE.size))
        except TimeoutError:
            self._socket.close()
            raise DeadlineExceeded("a bulk port says nothing", where=self._address) from None
        except OSError as error:
            self._socket.close()
            raise PeerLost(
                f"a bulk port does not take the key of this mesh: {error}", where=self._address
            ) from error
        if proof is None:
            self._socket.close()
            raise PeerLost("another program has taken a bulk port", where=self._address)
        self._proof = proof
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, verb: bytes, digest: str, content: bytes | memoryview = b"") -> bytes:
        """What the server answers to one request. The error that it reports; DeadlineExceeded,
        PeerLost, BadMessage when it answers too much.
        """
        try:
            head = REQUEST.pack(verb, bytes.fromhex(digest), len(content))
            self._socket.settimeout(self._left())
            self._socket.sendall(self._proof + head)
            self._proof = b""
            if content:
                self._socket.sendall(content)
            status, length = ANSWER.unpack(self._receive(ANSWER.size))
            answer = self._receive(length)
        except TimeoutError:
            raise DeadlineExceeded("a transfer took too long", where=self._address) from None
        except OSError as error:
            raise PeerLost(f"a transfer broke off: {error}", where=self._address) from error
        if status != OK:
            raise error_from_wire(*unpack_error(answer), where=self._address)
        return answer

    def _receive(self, length: int) -> bytes:
        if length > self._largest_bytes:
            raise BadMessage(f"an answer of {length} bytes", where=self._address)
        content = bytearray(length)
        view = memoryview(content)
        while view:
            self._socket.settimeout(self._left())
            received = self._socket.recv_into(view, min(len(view), PIECE_BYTES))
            if received == 0:
                raise ConnectionError("the server closed the connection")
            view = view[received:]
        return bytes(content)

    def _left(self) -> float:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("a transfer took too long", where=self._address)
        return left
