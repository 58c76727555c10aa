"""A bulk port where each process has a key of its own, and who knocks there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.transport.address import format_bulk_key
from meshrl.common.mesh.transport.keys import ProcessKeys
from meshrl.common.weights.bulk.authenticators import KeyAuthenticator
from meshrl.common.weights.bulk.server import BulkServer
from meshrl.common.weights.bulk.session import BulkSession
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from tests.load import scaled

CONTENT = os.urandom(700_000)
HOST = "gpu1-1f3a9c"
DEADLINE_S = 30.0


class Port:
    """The weight store's, with one chunk. `roles`: whose keys Redis says they are."""

    def __init__(self, directory: Path, *, sealed: bool = True, advertise: str = "") -> None:
        self.roles: dict[str, str] = {}
        self.asked = 0
        self.waits: Callable[[Sequence[str]], object] = lambda keys: None  # before Redis answers
        self.chunks = ChunkStore(directory)
        self.digest = self.chunks.write(CONTENT)
        self.keys = self._made("weights")
        self.address = self.keys.make_address("tcp://127.0.0.1:1")
        door = KeyAuthenticator(self.keys, "weights", sealed)
        self.server = BulkServer(
            self.chunks, SystemHost(), "tcp://127.0.0.1:*", advertise, authenticator=door
        )
        self.place = self.server.address.partition("#")[0]
        self.number = int(self.place.rpartition(":")[2])

    def _made(self, role: str) -> ProcessKeys:
        keys = ProcessKeys(self._whose, time.monotonic)
        if role:
            self.roles[format_bulk_key(keys.bulk_public_key)] = f"{role}@{HOST}"
        return keys

    def _whose(self, keys: Sequence[str]) -> list[tuple[str, ...]]:
        self.asked += 1
        self.waits(keys)
        return [(self.roles[key],) if key in self.roles else () for key in keys]

    def door(self, role: str, *, sealed: bool = True) -> KeyAuthenticator:
        """Of a new process of this role; empty: its key is nobody's who is let in."""
        return KeyAuthenticator(self._made(role), role, sealed)

    def session(
        self, door: KeyAuthenticator, address: str = "", deadline_s: float = DEADLINE_S
    ) -> BulkSession:
        """Not entered yet."""
        proof = door.begin_client_handshake(address or self.address, self.place)
        return BulkSession(self.place, proof, scaled(deadline_s), 1 << 30)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.number), timeout=scaled(DEADLINE_S))

    def revoke(self, door: KeyAuthenticator) -> None:
        """As Redis and the next renewal of a lease bring it about."""
        del self.roles[format_bulk_key(door._keys.bulk_public_key)]
        self.keys.refresh_keys(len(self.roles) + 1000)


def all_of(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    received = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            received += more
    return received
