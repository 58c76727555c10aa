"""Bulk ports and peers without a key, or with malformed messages."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshrl.common.base.errors import HandshakeFailed, MeshError, PeerLost
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.registry import RegistryEntry
from meshrl.common.weights.bulk.authenticators import InProcessAuthenticator
from meshrl.common.weights.bulk.channel import FRAME_BYTES
from meshrl.common.weights.bulk.port import BulkClient, BulkServer, ChunkStore
from meshrl.common.weights.bulk.served_connection import ServedConnection
from meshrl.common.weights.bulk.server import (
    HANDSHAKE_TIMEOUT_S,
    MAX_CONNECTIONS,
    MAX_UNAUTHENTICATED,
)
from meshrl.common.weights.bulk.session import (
    DIRECTORY,
    GET,
    HAS,
    PARTIAL_SIZE,
    PUT,
    REQUEST_HEADER,
    RESPONSE_HEADER,
)
from meshrl.common.weights.chunks.verified_files import RECORD_FILE
from meshrl.common.weights.handshakes.handshake import (
    SUITES_BY_MAGIC,
    ClientHandshake,
    ServerHandshake,
)
from tests.load import scaled
from tests.unit.common.mesh.runtime.talking import Join
from tests.unit.common.weights.bulk.keyed_port import CONTENT, Port, read_all

CHALLENGE_BYTES = ClientHandshake.challenge_bytes
CHUNK = os.urandom(100_000)
SETTINGS = MeshSettings("memory://", "", host="here", secret="5e" * 32)
SLOW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NUMBERS = st.sampled_from([0, 1, 2, len(CONTENT), 1 << 20, 1 << 32, 1 << 62, (1 << 64) - 1]) | (
    st.integers(0, (1 << 64) - 1)
)
FIRST = st.binary(max_size=300) | st.builds(
    bytes.__add__, st.sampled_from(list(SUITES_BY_MAGIC)), st.binary(max_size=200)
)
LENGTHS = st.integers(0, (1 << 32) - 1) | st.integers(FRAME_BYTES, FRAME_BYTES + 40)


class Served:
    """A port with one chunk."""

    def __init__(self, directory: Path) -> None:
        self.chunks = ChunkStore(directory)
        self.digest = self.chunks.write(CHUNK)
        door = InProcessAuthenticator()
        self.server = BulkServer(self.chunks, SystemHost(), "tcp://127.0.0.1:*", authenticator=door)
        self.place = self.server.address.partition("#")[0]
        self.port = int(self.place.rpartition(":")[2])
        self.entry = RegistryEntry("store", "test", bulk=self.server.address, host="there")

    def connect(self) -> socket.socket:
        return socket.create_connection(
            ("127.0.0.1", self.port), timeout=scaled(HANDSHAKE_TIMEOUT_S + 20)
        )

    def request(self, verb: bytes, length: int = 0) -> bytes:
        return REQUEST_HEADER.pack(verb, 0, bytes.fromhex(self.digest), 0, length, length)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path / "chunks")
    yield made
    made.server.close()


@pytest.fixture
async def client(join: Join) -> BulkClient:
    return BulkClient(await join("client", settings=SETTINGS))


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
            there = RegistryEntry("store", "test", bulk=f"tcp://127.0.0.1:{port}", host="there")
            with pytest.raises(HandshakeFailed, match="Another program"):
                await client.put_chunk(there, b"for the store alone", deadline_s=scaled(10))


async def test_a_proof_is_not_passed_on_from_another_port(
    served: Served, client: BulkClient
) -> None:
    with squatting(None, onwards=served.port) as port:
        there = RegistryEntry("store", "test", bulk=f"tcp://127.0.0.1:{port}", host="there")
        with pytest.raises(PeerLost):
            await client.fetch_chunk(there, served.digest, deadline_s=scaled(10))


async def test_strangers_are_bounded_and_never_keep_ours_out(
    served: Served, client: BulkClient
) -> None:
    strangers = [served.connect() for _ in range(MAX_CONNECTIONS + MAX_UNAUTHENTICATED)]
    strangers[-1].sendall(os.urandom(ServerHandshake.hello_bytes - 1))
    assert await client.fetch_chunk(served.entry, served.digest) == CHUNK
    digest = await client.put_chunk(served.entry, b"while they wait")
    assert await client.fetch_chunk(served.entry, digest) == b"while they wait"
    assert served.server.connection_count <= MAX_UNAUTHENTICATED + 1
    for stranger in strangers:
        assert read_all(stranger) == b"", "half-open ones are dropped before this end times out"
        stranger.close()


@pytest.fixture(params=[True, False], ids=["sealed", "plain"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Port]:
    made = Port(tmp_path / "chunks", sealed=request.param)
    yield made
    made.server.close()


def goes_on(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    with port.session(port.make_authenticator("trainer", sealed=False)) as session:
        assert session.fetch_chunk(port.digest) == CONTENT
    assert "Traceback" not in capfd.readouterr().err


@SLOW
@given(first=FIRST)
def test_bytes_without_a_proof_are_not_answered(
    port: Port, capfd: pytest.CaptureFixture[str], first: bytes
) -> None:
    with port.connect() as connection:
        with suppress(OSError):  # it has hung up already
            connection.sendall(first)
            connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
    goes_on(port, capfd)


@SLOW
@given(
    verb=st.sampled_from([GET, PUT, HAS, PARTIAL_SIZE, DIRECTORY])
    | st.binary(min_size=1, max_size=1),
    digest=st.just(b"") | st.binary(min_size=32, max_size=32),
    space=st.integers(0, 255),
    numbers=st.tuples(NUMBERS, NUMBERS, NUMBERS),
    behind=st.binary(max_size=2000),
)
def test_requests_that_make_no_sense_end_their_connection_at_most(
    port: Port,
    capfd: pytest.CaptureFixture[str],
    verb: bytes,
    digest: bytes,
    space: int,
    numbers: tuple[int, int, int],
    behind: bytes,
) -> None:
    with port.session(port.make_authenticator("trainer", sealed=False)) as session:
        head = REQUEST_HEADER.pack(verb, space, digest or bytes.fromhex(port.digest), *numbers)
        with suppress(OSError, MeshError):
            session._send(head)
            session._send(behind)
            session._socket.shutdown(socket.SHUT_WR)
            session._receive_exactly(RESPONSE_HEADER.size)
    goes_on(port, capfd)


@SLOW
@given(length=LENGTHS, sealed=st.binary(max_size=600))
def test_frames_that_nobody_sealed_end_their_connection(
    port: Port, capfd: pytest.CaptureFixture[str], length: int, sealed: bytes
) -> None:
    with (
        port.session(port.make_authenticator("trainer", sealed=True)) as session,
        suppress(OSError),
    ):
        session._socket.setblocking(True)
        session._socket.sendall(length.to_bytes(4, "little") + sealed)
        session._socket.shutdown(socket.SHUT_WR)
        assert read_all(session._socket) == b""
    goes_on(port, capfd)


@pytest.mark.deep
def test_a_flood_leaves_nothing(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither what served it nor scratch files."""
    hello = (
        port.make_authenticator("", sealed=True)
        .begin_client_handshake(port.address, port.url)
        .make_hello()
    )
    for _ in range(100):
        for content in (b"", os.urandom(101), next(iter(SUITES_BY_MAGIC)) + os.urandom(97), hello):
            with port.connect() as connection, suppress(OSError):
                connection.sendall(content)
    goes_on(port, capfd)
    gc.collect()
    every = [one for one in gc.get_objects() if isinstance(one, ServedConnection)]
    served = [one for one in every if one._chunks is port.chunks]
    assert (
        len(served) <= MAX_UNAUTHENTICATED + 2
        and port.server.connection_count <= MAX_UNAUTHENTICATED + 1
    )
    assert [path.name for path in port.chunks.directory.rglob(".*")] == [RECORD_FILE]
