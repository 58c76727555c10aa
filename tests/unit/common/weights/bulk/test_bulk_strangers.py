"""A peer without a key of the mesh gets nothing from its bulk ports, and cannot pass for one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from meshrl.common.base.errors import HandshakeFailed, PeerLost
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.registry import Entry
from meshrl.common.weights.bulk.doors import InterpreterDoor
from meshrl.common.weights.bulk.port import BulkClient, BulkServer, ChunkStore
from meshrl.common.weights.bulk.server import CONNECTIONS, PROOF_S, STRANGERS
from meshrl.common.weights.bulk.session import REQUEST
from meshrl.common.weights.handshakes.handshake import ClientHandshake, ServerHandshake
from tests.load import scaled
from tests.unit.common.mesh.runtime.talking import Join

CHALLENGE_BYTES = ClientHandshake.challenge_bytes
CONTENT = os.urandom(100_000)
SETTINGS = MeshSettings("memory://", "", host="here", secret="5e" * 32)


class Served:
    """A port with one chunk."""

    def __init__(self, directory: Path) -> None:
        self.chunks = ChunkStore(directory)
        self.digest = self.chunks.write(CONTENT)
        door = InterpreterDoor()
        self.server = BulkServer(self.chunks, SystemHost(), "tcp://127.0.0.1:*", door=door)
        self.place = self.server.address.partition("#")[0]
        self.port = int(self.place.rpartition(":")[2])
        self.entry = Entry("store", "test", bulk=self.server.address, host="there")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=scaled(PROOF_S + 20))

    def request(self, verb: bytes, length: int = 0) -> bytes:
        return REQUEST.pack(verb, 0, bytes.fromhex(self.digest), 0, length, length)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path / "chunks")
    yield made
    made.server.close()


@pytest.fixture
async def client(join: Join) -> BulkClient:
    return BulkClient(await join("client", settings=SETTINGS))


def all_of(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    received = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            received += more
    return received


@contextmanager
def squatting(answer: bytes | None, onwards: int = 0) -> Iterator[int]:
    """A foreign server: it answers every hello with `answer`, or passes all on to a port and back;
    its port.
    """

    def serve() -> None:
        with suppress(OSError):
            while True:
                taken, _ = listener.accept()
                with taken:
                    hello = taken.recv(ServerHandshake.hello_bytes, socket.MSG_WAITALL)
                    if answer is not None:
                        taken.sendall(answer)
                        continue
                    with socket.create_connection(("127.0.0.1", onwards)) as real:
                        real.sendall(hello)
                        taken.sendall(real.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(scaled(10))


async def test_a_foreign_server_cannot_pass_for_ours(served: Served, client: BulkClient) -> None:
    for answer in (
        bytes(CHALLENGE_BYTES),
        os.urandom(CHALLENGE_BYTES),
    ):
        with squatting(answer) as port:
            there = Entry("store", "test", bulk=f"tcp://127.0.0.1:{port}", host="there")
            with pytest.raises(HandshakeFailed, match="Another program"):
                await client.put(there, b"for the store alone", deadline_s=scaled(10))


async def test_a_proof_is_not_passed_on_from_another_port(
    served: Served, client: BulkClient
) -> None:
    with squatting(None, onwards=served.port) as port:
        there = Entry("store", "test", bulk=f"tcp://127.0.0.1:{port}", host="there")
        with pytest.raises(PeerLost):
            await client.get(there, served.digest, deadline_s=scaled(10))


async def test_strangers_are_bounded_and_never_keep_ours_out(
    served: Served, client: BulkClient
) -> None:
    strangers = [served.connect() for _ in range(CONNECTIONS + STRANGERS)]
    strangers[-1].sendall(os.urandom(ServerHandshake.hello_bytes - 1))
    assert await client.get(served.entry, served.digest) == CONTENT
    digest = await client.put(served.entry, b"while they wait")
    assert await client.get(served.entry, digest) == b"while they wait"
    assert served.server.connections <= STRANGERS + 1
    for stranger in strangers:
        assert all_of(stranger) == b"", "half-open ones are dropped before this end times out"
        stranger.close()
