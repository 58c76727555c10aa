"""Bulk port of a weight store whose clients each have a key of their own."""

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
    """Bulk port of a weight store with one chunk. `roles`: roles of keys, as recorded in Redis."""

    def __init__(self, directory: Path, *, sealed: bool = True, advertise: str = "") -> None:
        self.roles: dict[str, str] = {}
        self.lookup_count = 0
        # called before Redis answers
        self.on_lookup: Callable[[Sequence[str]], object] = lambda keys: None
        self.chunks = ChunkStore(directory)
        self.digest = self.chunks.write(CONTENT)
        self.keys = self._make_keys("weights")
        self.address = self.keys.make_address("tcp://127.0.0.1:1")
        authenticator = KeyAuthenticator(self.keys, "weights", sealed)
        self.server = BulkServer(
            self.chunks, SystemHost(), "tcp://127.0.0.1:*", advertise, authenticator=authenticator
        )
        self.url = self.server.address.partition("#")[0]
        self.port_number = int(self.url.rpartition(":")[2])

    def _make_keys(self, role: str) -> ProcessKeys:
        keys = ProcessKeys(self._look_up_keys, time.monotonic)
        if role:
            self.roles[format_bulk_key(keys.bulk_public_key)] = f"{role}@{HOST}"
        return keys

    def _look_up_keys(self, keys: Sequence[str]) -> list[tuple[str, ...]]:
        self.lookup_count += 1
        self.on_lookup(keys)
        return [(self.roles[key],) if key in self.roles else () for key in keys]

    def make_authenticator(self, role: str, *, sealed: bool = True) -> KeyAuthenticator:
        """Return the authenticator of a new process; without a role its key is unknown."""
        return KeyAuthenticator(self._make_keys(role), role, sealed)

    def session(
        self, authenticator: KeyAuthenticator, address: str = "", deadline_s: float = DEADLINE_S
    ) -> BulkSession:
        """Return a session whose handshake has not begun."""
        proof = authenticator.begin_client_handshake(address or self.address, self.url)
        return BulkSession(self.url, proof, scaled(deadline_s), 1 << 30)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port_number), timeout=scaled(DEADLINE_S))

    def revoke(self, authenticator: KeyAuthenticator) -> None:
        """Delete the key from the record and the cache, as a renewal of a lease does."""
        del self.roles[format_bulk_key(authenticator._keys.bulk_public_key)]
        self.keys.refresh_keys(len(self.roles) + 1000)


def read_all(connection: socket.socket) -> bytes:
    """Read until the other end closes."""
    received = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            received += more
    return received
