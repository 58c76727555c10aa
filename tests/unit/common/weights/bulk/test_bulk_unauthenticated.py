"""Bulk ports and unauthenticated peers, or malformed messages."""

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


class ServedPort:
    """Bulk port with one chunk."""

    def __init__(self, directory: Path) -> None:
        self.chunks = ChunkStore(directory)
        self.digest = self.chunks.write(CHUNK)
        authenticator = InProcessAuthenticator()
        self.server = BulkServer(
            self.chunks, SystemHost(), "tcp://127.0.0.1:*", authenticator=authenticator
        )
        self.url = self.server.address.partition("#")[0]
        self.port = int(self.url.rpartition(":")[2])
        self.entry = RegistryEntry("store", "test", bulk=self.server.address, host="there")

    def connect(self) -> socket.socket:
        return socket.create_connection(
            ("127.0.0.1", self.port), timeout=scaled(HANDSHAKE_TIMEOUT_S + 20)
        )

    def request(self, verb: bytes, length: int = 0) -> bytes:
        return REQUEST_HEADER.pack(verb, 0, bytes.fromhex(self.digest), 0, length, length)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedPort]:
    created = ServedPort(tmp_path / "chunks")
    yield created
    created.server.close()


@pytest.fixture
async def client(join: Join) -> BulkClient:
    return BulkClient(await join("client", settings=SETTINGS))


@contextmanager
def run_foreign_server(answer: bytes | None, relay_port: int = 0) -> Iterator[int]:
    """Run a foreign server that answers each hello with `answer`, or relays it to a port; yield its
    own port.
    """

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    hello = connection.recv(ServerHandshake.hello_bytes, socket.MSG_WAITALL)
                    if answer is not None:
                        connection.sendall(answer)
                        continue
                    with socket.create_connection(("127.0.0.1", relay_port)) as target:
                        target.sendall(hello)
                        connection.sendall(target.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(scaled(10))


async def test_foreign_server_is_rejected_by_the_client(
    served: ServedPort, client: BulkClient
) -> None:
    for answer in (
        bytes(CHALLENGE_BYTES),
        os.urandom(CHALLENGE_BYTES),
    ):
        with run_foreign_server(answer) as port:
            foreign_entry = RegistryEntry(
                "store", "test", bulk=f"tcp://127.0.0.1:{port}", host="there"
            )
            with pytest.raises(HandshakeFailed, match="another program"):
                await client.put_chunk(foreign_entry, b"for the store alone", deadline_s=scaled(10))


async def test_relayed_handshake_is_rejected(served: ServedPort, client: BulkClient) -> None:
    with run_foreign_server(None, relay_port=served.port) as port:
        foreign_entry = RegistryEntry("store", "test", bulk=f"tcp://127.0.0.1:{port}", host="there")
        with pytest.raises(PeerLost):
            await client.fetch_chunk(foreign_entry, served.digest, deadline_s=scaled(10))


async def test_unauthenticated_peers_are_bounded_and_block_no_client(
    served: ServedPort, client: BulkClient
) -> None:
    peers = [served.connect() for _ in range(MAX_CONNECTIONS + MAX_UNAUTHENTICATED)]
    peers[-1].sendall(os.urandom(ServerHandshake.hello_bytes - 1))
    assert await client.fetch_chunk(served.entry, served.digest) == CHUNK
    digest = await client.put_chunk(served.entry, b"while they wait")
    assert await client.fetch_chunk(served.entry, digest) == b"while they wait"
    assert served.server.connection_count <= MAX_UNAUTHENTICATED + 1
    for peer in peers:
        assert read_all(peer) == b"", "half-open connections are closed before this end times out"
        peer.close()


@pytest.fixture(params=[True, False], ids=["sealed", "plain"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Port]:
    created = Port(tmp_path / "chunks", sealed=request.param)
    yield created
    created.server.close()


def assert_still_serves(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    with port.session(port.make_authenticator("trainer", sealed=False)) as session:
        assert session.fetch_chunk(port.digest) == CONTENT
    assert "Traceback" not in capfd.readouterr().err


@SLOW
@given(first=FIRST)
def test_bytes_without_a_proof_get_no_answer(
    port: Port, capfd: pytest.CaptureFixture[str], first: bytes
) -> None:
    with port.connect() as connection:
        with suppress(OSError):  # the server has closed the connection already
            connection.sendall(first)
            connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
    assert_still_serves(port, capfd)


@SLOW
@given(
    verb=st.sampled_from([GET, PUT, HAS, PARTIAL_SIZE, DIRECTORY])
    | st.binary(min_size=1, max_size=1),
    digest=st.just(b"") | st.binary(min_size=32, max_size=32),
    space=st.integers(0, 255),
    numbers=st.tuples(NUMBERS, NUMBERS, NUMBERS),
    body=st.binary(max_size=2000),
)
def test_malformed_requests_close_only_their_connection(
    port: Port,
    capfd: pytest.CaptureFixture[str],
    verb: bytes,
    digest: bytes,
    space: int,
    numbers: tuple[int, int, int],
    body: bytes,
) -> None:
    with port.session(port.make_authenticator("trainer", sealed=False)) as session:
        header = REQUEST_HEADER.pack(verb, space, digest or bytes.fromhex(port.digest), *numbers)
        with suppress(OSError, MeshError):
            session._send(header)
            session._send(body)
            session._socket.shutdown(socket.SHUT_WR)
            session._receive_exactly(RESPONSE_HEADER.size)
    assert_still_serves(port, capfd)


@SLOW
@given(length=LENGTHS, sealed=st.binary(max_size=600))
def test_unauthenticated_frames_close_their_connection(
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
    assert_still_serves(port, capfd)


@pytest.mark.deep
def test_connection_flood_leaves_no_connections_or_files(
    port: Port, capfd: pytest.CaptureFixture[str]
) -> None:
    hello = (
        port.make_authenticator("", sealed=True)
        .begin_client_handshake(port.address, port.url)
        .make_hello()
    )
    for _ in range(100):
        for content in (b"", os.urandom(101), next(iter(SUITES_BY_MAGIC)) + os.urandom(97), hello):
            with port.connect() as connection, suppress(OSError):
                connection.sendall(content)
    assert_still_serves(port, capfd)
    gc.collect()
    connections = [one for one in gc.get_objects() if isinstance(one, ServedConnection)]
    own_connections = [one for one in connections if one._chunks is port.chunks]
    assert (
        len(own_connections) <= MAX_UNAUTHENTICATED + 2
        and port.server.connection_count <= MAX_UNAUTHENTICATED + 1
    )
    assert [path.name for path in port.chunks.directory.rglob(".*")] == [RECORD_FILE]
