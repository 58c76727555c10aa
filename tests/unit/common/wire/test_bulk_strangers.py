"""Who does not know a mesh's secret gets nothing from its bulk ports, and cannot pass for one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import HandshakeFailed, PeerLost
from common.process.host import SystemHost
from common.settings import MeshSettings
from common.state.registry import Entry
from common.wire.bulk.port import BulkClient, BulkServer, ChunkStore, SecretDoor
from common.wire.bulk.server import CONNECTIONS, PROOF_S, STRANGERS
from common.wire.bulk.session import ANSWER, GET, HAS, PUT, REQUEST
from common.wire.handshake import CHALLENGE, HELLO, MAGIC, TAG_BYTES
from tests.load import scaled
from tests.unit.common.runtime.talking import Join

CONTENT = os.urandom(100_000)
SETTINGS = MeshSettings("memory://", "", host="here", secret="5e" * 32)
OF_ANOTHER_START = replace(SETTINGS, secret="a7" * 32)


class Served:
    """A port with one chunk."""

    def __init__(self, directory: Path) -> None:
        self.chunks = ChunkStore(directory)
        self.digest = self.chunks.write(CONTENT)
        door = SecretDoor.of(SETTINGS)
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


@pytest.mark.parametrize("verb", [GET, PUT, HAS])
def test_a_verb_without_a_proof_is_not_answered(served: Served, verb: bytes) -> None:
    guessed = SecretDoor.of(OF_ANOTHER_START).asking("", served.place).hello()
    for first in (b"", MAGIC, MAGIC + bytes(HELLO.size - len(MAGIC)), guessed):
        with served.connect() as connection:
            connection.sendall(first + served.request(verb, 1 << 20) + bytes(HELLO.size))
            assert all_of(connection) == b""
    assert served.chunks.read(served.digest) == CONTENT


def test_a_recorded_hello_opens_nothing(served: Served) -> None:
    asking = SecretDoor.of(SETTINGS).asking("", served.place)
    with served.connect() as honest:
        honest.sendall(asking.hello())
        proof = asking.proof(honest.recv(CHALLENGE.size, socket.MSG_WAITALL))
        assert proof is not None
        honest.sendall(proof + served.request(HAS))
        honest.shutdown(socket.SHUT_WR)
        assert all_of(honest)[ANSWER.size :] == b"\x01"
    for replayed in (proof, bytes(TAG_BYTES)):
        with served.connect() as connection:
            connection.sendall(asking.hello() + replayed + served.request(GET))
            assert len(all_of(connection)) == CHALLENGE.size


async def test_a_client_of_another_start_is_refused_by_a_typed_error(
    served: Served, join: Join
) -> None:
    other = BulkClient(await join("other", settings=OF_ANOTHER_START))
    with pytest.raises(HandshakeFailed, match="keys\\? A bulk port does not let"):
        await other.get(served.entry, served.digest, deadline_s=scaled(10))
    with pytest.raises(HandshakeFailed, match="keys\\? A bulk port does not let"):
        await other.put(served.entry, b"planted", deadline_s=scaled(10))


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
                    hello = taken.recv(HELLO.size, socket.MSG_WAITALL)
                    if answer is not None:
                        taken.sendall(answer)
                        continue
                    with socket.create_connection(("127.0.0.1", onwards)) as real:
                        real.sendall(hello)
                        taken.sendall(real.recv(CHALLENGE.size, socket.MSG_WAITALL))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(scaled(10))


async def test_a_foreign_server_cannot_pass_for_ours(served: Served, client: BulkClient) -> None:
    other = SecretDoor.of(OF_ANOTHER_START)
    for answer in (bytes(CHALLENGE.size), os.urandom(CHALLENGE.size)):
        with squatting(answer) as port:
            there = Entry("store", "test", bulk=f"tcp://127.0.0.1:{port}", host="there")
            with pytest.raises(HandshakeFailed, match="Another program"):
                await client.put(there, b"for the store alone", deadline_s=scaled(10))
    place = f"tcp://127.0.0.1:{served.port}"
    assert other.answering(place).whose(SecretDoor.of(SETTINGS).asking("", place).hello()) is None


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
    strangers[-1].sendall(os.urandom(HELLO.size - 1))
    assert await client.get(served.entry, served.digest) == CONTENT
    digest = await client.put(served.entry, b"while they wait")
    assert await client.get(served.entry, digest) == b"while they wait"
    assert served.server.connections <= STRANGERS + 1
    for stranger in strangers:
        assert all_of(stranger) == b"", "half-open ones are dropped before this end times out"
        stranger.close()
