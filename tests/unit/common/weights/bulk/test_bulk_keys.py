"""Access to a bulk port by the keys of processes: by role, until a key is revoked."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from meshrl.common.api.calls.call_permissions import ROLES
from meshrl.common.api.transfer.bulk_permissions import (
    BULK_PERMISSIONS,
    PUBLISHED,
    SPACES,
    put_right,
)
from meshrl.common.api.transfer.bulk_permissions import GET as MAY_GET
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import (
    HandshakeFailed,
    NotAllowed,
    NotFound,
    PeerLost,
    StateUnavailable,
)
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.dependencies import AccessRules, LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.process_credentials import ProcessCredentials
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.state.hosts import credentials as mesh_doors
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry
from meshrl.common.weights.bulk.port import BulkClient, ChunkStore, serve_chunks
from meshrl.common.weights.bulk.server import (
    ACCEPT_PAUSE_S,
    MAX_CONNECTIONS_PER_USER,
    MAX_UNAUTHENTICATED,
)
from meshrl.common.weights.bulk.session import (
    GET,
    HAS,
    PARTIAL_SIZE,
    PUT,
    REQUEST_HEADER,
    BulkSession,
)
from meshrl.common.weights.chunks.partial_file import PartialFile
from meshrl.common.weights.handshakes.handshake import SUITES_BY_MAGIC, ClientHandshake
from meshrl.sim.redis.client import SimulatedSyncRedisClient
from meshrl.sim.redis.server import SimulatedRedisServer
from meshrl.sim.redis.simulated_state import open_state_on
from tests import ends
from tests.load import scaled
from tests.meshes import PATIENT
from tests.unit.common.weights.bulk.faulty_proxy import FaultyProxy
from tests.unit.common.weights.bulk.keyed_port import CONTENT, DEADLINE_S, Port, read_all

HEAD, JOINED = "head-000001", "gpu2-77aa01"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    port = Port(tmp_path / "chunks")
    yield port
    port.server.close()


# ---------------------------------------------------------------- complete processes


@pytest.mark.parametrize("encrypt", [None, False])
async def test_processes_of_two_hosts_transfer_chunks_and_files(
    tmp_path: Path, encrypt: bool | None
) -> None:
    clock = SystemClock()
    redis = SimulatedRedisServer(clock)
    owner = open_state_on(redis, StateClient, clock)

    async def mesh(name: str, host: str) -> Mesh:
        await mesh_doors.admit_host(owner, host)
        role = name.partition("/")[0]
        state = open_state_on(redis, StateClient, clock)
        credentials = await ProcessCredentials.register(
            name, role, host, state, SimulatedSyncRedisClient(redis), clock
        )
        joined = Mesh(
            name,
            role,
            MeshDependencies(
                state=state,
                transport=ZmqTransport(keys=credentials.keys),
                clock=clock,
                random=Random.from_os_entropy(),
                host=SystemHost(),
                owns_state=True,
            ),
            settings=MeshSettings("", "", host=host, joinable=True, encrypt=encrypt),
            terms=LeaseTerms(on_lost=ends.report_lost_lease, **PATIENT),
            access=AccessRules(credentials=credentials),
        )
        await joined.join(None)
        return joined

    store, trainer, engine = (
        await mesh("weights", HEAD),
        await mesh("trainer/job", JOINED),
        await mesh("engine/g0", JOINED),
    )
    other_trainer = await mesh("trainer/other", HEAD)
    store_chunks = ChunkStore(tmp_path / "chunks")
    server = serve_chunks(store, store_chunks)
    entry = RegistryEntry("weights", "weights", store.transport.address, server.address, host=HEAD)
    try:
        client = BulkClient(trainer, part_bytes=100_000)
        digest = await client.put_chunk(entry, CONTENT)
        assert await client.fetch_chunk(entry, digest) == CONTENT
        (source := tmp_path / "source").write_bytes(CONTENT[1:])
        file_digest = await client.put_file(entry, source)
        with PartialFile.for_file(target := tmp_path / "target", file_digest) as partial:
            await BulkClient(engine).fetch_to_file(entry, partial)
        assert target.read_bytes() == CONTENT[1:]
        with pytest.raises(NotAllowed, match="role engine may not put chunks of weights"):
            await BulkClient(engine).put_chunk(entry, CONTENT)
        # Files are accessed directly where the store itself serves them, not where a registry row
        # says.
        local_client = BulkClient(other_trainer)
        assert (await local_client.open_local_store(entry)) is not None
        (elsewhere := tmp_path / "elsewhere").mkdir()
        entry.bulk = server.address.partition("#")[0] + f"#{elsewhere}"
        stored = await local_client.put_chunk(entry, CONTENT[2:])
        assert store_chunks.has(stored) and not list(elsewhere.iterdir())
        foreign_digest = ChunkStore(elsewhere).write(b"of another")
        with pytest.raises(NotFound):
            await local_client.fetch_chunk(entry, foreign_digest)
        entry.bulk = server.address
        entry.address = engine.transport.address  # a process that claims to be the store
        with pytest.raises(HandshakeFailed, match=f"belongs to engine@{JOINED}, not to weights"):
            await client.fetch_chunk(entry, digest)
        entry.address = store.transport.address
        assert trainer.credentials is not None
        await mesh_doors.revoke_key(owner, trainer.credentials.row.public_key)
        assert store.credentials is not None
        store.credentials.keys.refresh_keys(1 << 40)
        with pytest.raises(HandshakeFailed, match="wrong keys"):
            await client.fetch_chunk(entry, digest)
        with pytest.raises(
            HandshakeFailed, match=r"the key of this process.*is no longer admitted"
        ):
            await client.fetch_chunk(entry, digest)
        assert await BulkClient(engine).fetch_chunk(entry, digest) == CONTENT
        store.rejections.report(clock.monotonic())
        assert (
            store.telemetry.counters["refused_bulk_keys"]
            == server.rejection_counts["bulk_keys"]
            > 0
        )
    finally:
        server.close()
        for one in (engine, trainer, other_trainer, store):
            await one.leave()
        await owner.close()


# ---------------------------------------------------------------- permissions


@pytest.mark.parametrize("role", sorted(ROLES))
def test_each_role_has_exactly_the_permissions_of_the_table(port: Port, role: str) -> None:
    authenticator = port.make_authenticator(role)
    for space in SPACES:
        may_put = role in BULK_PERMISSIONS.get(("weights", put_right(space)), ())
        for verb, is_allowed in {
            GET: role in BULK_PERMISSIONS["weights", MAY_GET],
            HAS: may_put,
        }.items():
            with port.session(authenticator) as session:
                if is_allowed:
                    with suppress(NotFound):
                        assert session.request(verb, port.digest, space=space) is not None
                    continue
                with pytest.raises(NotAllowed, match=f"role {role} may not .*chunks of weights"):
                    session.request(verb, port.digest, space=space)
                with pytest.raises(PeerLost):
                    session.request(verb, port.digest, space=space)
        digest = compute_digest(f"planted in {space}".encode())
        try:
            with port.session(authenticator) as session:
                session.request(PUT, digest, f"planted in {space}".encode(), space=space)
            assert may_put
        except (NotAllowed, PeerLost):
            assert not may_put
        stored_by_space = {name: port.chunks.open_space(name).has(digest) for name in SPACES}
        assert stored_by_space == {name: may_put and name == space for name in SPACES}


def test_permission_table_has_known_roles_and_no_publishing_role() -> None:
    for (served, _), roles in BULK_PERMISSIONS.items():
        assert {served} | roles <= ROLES
    assert not any("sandbox" in roles for roles in BULK_PERMISSIONS.values())
    assert ("weights", put_right(PUBLISHED)) not in BULK_PERMISSIONS


def test_revoked_key_is_rejected_at_its_next_request(port: Port) -> None:
    authenticator, other = port.make_authenticator("engine"), port.make_authenticator("engine")
    with port.session(authenticator) as session, port.session(other) as other_session:
        assert session.fetch_chunk(port.digest) == CONTENT
        assert other_session.fetch_chunk(port.digest) == CONTENT
        port.revoke(authenticator)
        with pytest.raises(NotAllowed, match="no longer admitted"):
            session.fetch_chunk(port.digest)
        assert other_session.fetch_chunk(port.digest) == CONTENT
    with pytest.raises(HandshakeFailed, match="wrong keys"), port.session(authenticator):
        pass


# ---------------------------------------------------------------- unauthenticated peers


def test_unauthenticated_peer_gets_no_byte(port: Port) -> None:
    """Check unknown keys, keys of other ports and malformed hellos."""
    address, url = port.address, port.url
    unknown_key, known_key = port.make_authenticator(""), port.make_authenticator("trainer")
    wrong_server = f"tcp://x:1#{'ab' * 32}.{'ab' * 32}"
    valid_hello = known_key.begin_client_handshake(address, url).make_hello()
    hellos = [
        b"",
        os.urandom(101),
        *(magic + os.urandom(97) for magic in SUITES_BY_MAGIC),
        unknown_key.begin_client_handshake(address, url).make_hello(),
        known_key.begin_client_handshake(wrong_server, url).make_hello(),
        known_key.begin_client_handshake(address, "tcp://127.0.0.2:1").make_hello(),
        valid_hello[:-1] + bytes([valid_hello[-1] ^ 1]),
    ]
    digest = bytes.fromhex(port.digest)
    requests = [
        REQUEST_HEADER.pack(verb, 0, digest, 0, 1 << 20, 1 << 20) for verb in (GET, PUT, HAS)
    ]
    before = {
        path: path.read_bytes() for path in port.chunks.directory.rglob("*") if path.is_file()
    }
    for hello in hellos:
        for request in requests:
            with port.connect() as connection:
                with suppress(OSError):  # the server has closed the connection already
                    connection.sendall(hello + bytes(16) + request + bytes(200))
                    connection.shutdown(socket.SHUT_WR)
                assert read_all(connection) == b"", hello[:4]
    after = {path: path.read_bytes() for path in port.chunks.directory.rglob("*") if path.is_file()}
    assert after == before and port.lookup_count <= 1 + len(requests) * len(hellos)


@pytest.mark.parametrize("peer", ["an unknown client", "a server with another key"])
def test_client_detects_a_wrong_key_at_once(port: Port, peer: str) -> None:
    address = ""
    if peer == "a server with another key":
        address = f"tcp://127.0.0.1:1#{'ab' * 32}.{'ab' * 32}"
    started = time.monotonic()
    authenticator = port.make_authenticator("trainer" if address else "")
    with (
        pytest.raises(HandshakeFailed, match="wrong keys"),
        port.session(authenticator, address, 3600.0),
    ):
        pass
    assert time.monotonic() - started < scaled(DEADLINE_S / 2)


def test_replayed_hello_is_rejected(port: Port) -> None:
    handshake = port.make_authenticator("trainer").begin_client_handshake(port.address, port.url)
    hello = handshake.make_hello()
    with port.connect() as honest:
        honest.sendall(hello)
        proof = handshake.answer_challenge(
            honest.recv(ClientHandshake.challenge_bytes, socket.MSG_WAITALL)
        )
        assert proof is not None
    for replayed in (proof, bytes(16)):
        with port.connect() as connection:
            connection.sendall(hello + replayed + bytes(100))
            assert len(read_all(connection)) == ClientHandshake.challenge_bytes


def test_key_lookup_does_not_block_other_connections(port: Port) -> None:
    slow, quick = port.make_authenticator("trainer"), port.make_authenticator("engine")
    lookup_started, lookup_may_finish = threading.Event(), threading.Event()
    with port.session(quick) as session:

        def wait_for_lookup(keys: object) -> None:
            lookup_started.set()
            assert lookup_may_finish.wait(scaled(DEADLINE_S))

        port.on_lookup = wait_for_lookup
        received: list[bytes] = []

        def connect() -> None:
            with port.session(slow) as late:
                received.append(late.fetch_chunk(port.digest))

        thread = threading.Thread(target=connect)
        thread.start()
        assert lookup_started.wait(scaled(DEADLINE_S))
        assert session.fetch_chunk(port.digest) == CONTENT and not received
        lookup_may_finish.set()
        thread.join(scaled(DEADLINE_S))
    assert received == [CONTENT]


def test_known_keys_are_accepted_during_an_outage_of_redis(port: Port) -> None:
    known, unknown = port.make_authenticator("engine"), port.make_authenticator("trainer")
    with port.session(known) as session:
        assert session.fetch_chunk(port.digest) == CONTENT

    def fail_lookup(keys: object) -> None:
        raise StateUnavailable("Redis does not answer")

    port.on_lookup = fail_lookup
    with port.session(known) as session:
        assert session.fetch_chunk(port.digest) == CONTENT
    with pytest.raises(HandshakeFailed) as error, port.session(unknown):
        pass
    assert error.value.retryable and port.server.rejection_counts["bulk_undecided"] == 1


@pytest.mark.parametrize("encrypt", [None, False, True])
@pytest.mark.parametrize("joinable", [False, True])
def test_joinable_meshes_are_encrypted_by_default(joinable: bool, encrypt: bool | None) -> None:
    settings = MeshSettings("", "", joinable=joinable, encrypt=encrypt)
    assert settings.is_bulk_encrypted == (joinable if encrypt is None else encrypt)


# ---------------------------------------------------------------- encryption


@pytest.mark.parametrize("magic", list(SUITES_BY_MAGIC), ids=["aes", "chacha"])
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "plain"])
def test_both_cipher_suites_carry_all_requests(tmp_path: Path, magic: bytes, sealed: bool) -> None:
    port = Port(tmp_path / "chunks", sealed=sealed)
    authenticator = port.make_authenticator("trainer", sealed=sealed)
    proof = authenticator.begin_client_handshake(port.address, port.url)
    private_key, server = authenticator._keys.bulk_private_key, port.keys.bulk_public_key
    proof = ClientHandshake(private_key, server, port.url, sealed, magic)
    with BulkSession(port.url, proof, scaled(DEADLINE_S), 1 << 30) as session:
        assert (proof.ciphers is not None) == sealed
        content = os.urandom(1_500_000)
        session.request(PUT, compute_digest(content), content)
        assert session.fetch_chunk(compute_digest(content)) == content
        with pytest.raises(NotFound):
            session.fetch_chunk("0" * 64)
        assert session.request(HAS, port.digest) == b"\x01"
    port.server.close()


@contextmanager
def serve_through_proxy(
    directory: Path, max_bytes: int = 1 << 40, sealed: bool = True
) -> Iterator[tuple[Port, FaultyProxy]]:
    port = Port(directory, sealed=sealed, advertise="127.0.0.2")
    with FaultyProxy(port.port_number, max_bytes) as proxy:
        yield port, proxy
    port.server.close()


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "plain"])
def test_encrypted_content_is_not_readable_on_the_wire(tmp_path: Path, sealed: bool) -> None:
    with (
        serve_through_proxy(tmp_path / "chunks", sealed=sealed) as (port, proxy),
        port.session(port.make_authenticator("trainer", sealed=sealed)) as session,
    ):
        assert session.fetch_chunk(port.digest) == CONTENT
    assert (CONTENT[1000:1032] in proxy.server_bytes) == (not sealed)
    assert len(proxy.server_bytes) > len(CONTENT)


@pytest.mark.parametrize("server, client", [(True, False), (False, True)])
def test_connection_is_encrypted_if_either_end_requires_it(
    tmp_path: Path, server: bool, client: bool
) -> None:
    with (
        serve_through_proxy(tmp_path / "chunks", sealed=server) as (port, proxy),
        port.session(port.make_authenticator("trainer", sealed=client)) as session,
    ):
        assert session.fetch_chunk(port.digest) == CONTENT
    assert CONTENT[1000:1032] not in proxy.server_bytes


def test_corrupt_or_truncated_streams_are_detected(tmp_path: Path) -> None:
    with serve_through_proxy(tmp_path / "chunks") as (port, proxy):
        authenticator = port.make_authenticator("trainer")
        with port.session(authenticator) as session:
            session.fetch_chunk(port.digest)
        total_bytes = len(proxy.server_bytes)
        for position in (
            *range(0, total_bytes, total_bytes // 20),
            total_bytes - 17,
            total_bytes - 1,
        ):
            proxy.corrupt_at = position
            with pytest.raises(PeerLost), port.session(authenticator) as session:
                session.fetch_chunk(port.digest)
        proxy.corrupt_at = -1
        for max_bytes in (*range(0, total_bytes, total_bytes // 20), total_bytes - 1):
            proxy.max_bytes = max_bytes
            with pytest.raises(PeerLost), port.session(authenticator) as session:
                session.fetch_chunk(port.digest)


# ---------------------------------------------------------------- limits


def test_connections_per_process_are_bounded(port: Port) -> None:
    many_connections, other = port.make_authenticator("engine"), port.make_authenticator("trainer")
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS_PER_USER):
            session = stack.enter_context(port.session(many_connections))
            session.fetch_chunk(port.digest)
        with pytest.raises(PeerLost), port.session(many_connections) as session:
            session.fetch_chunk(port.digest)
        with port.session(other) as session:
            assert session.fetch_chunk(port.digest) == CONTENT
    assert port.server.rejection_counts["bulk_crowd"] == 1


def test_peer_with_many_connections_evicts_only_its_own(port: Port) -> None:
    with ExitStack() as stack:
        slow_peer = stack.enter_context(
            socket.create_connection(
                ("127.0.0.1", port.port_number), scaled(DEADLINE_S), source_address=("127.0.0.3", 0)
            )
        )
        handshake = port.make_authenticator("trainer").begin_client_handshake(
            port.address, port.url
        )
        hello = handshake.make_hello()
        slow_peer.sendall(hello[:50])
        for _ in range(3 * MAX_UNAUTHENTICATED):
            stack.enter_context(port.connect())
        slow_peer.sendall(hello[50:])
        assert len(slow_peer.recv(ClientHandshake.challenge_bytes, socket.MSG_WAITALL)) == (
            ClientHandshake.challenge_bytes
        )
        assert port.server.connection_count <= MAX_UNAUTHENTICATED


def test_server_pauses_without_descriptors_and_then_continues(port: Port) -> None:
    authenticator = port.make_authenticator("trainer")
    with port.session(authenticator) as session, ExitStack() as stack:
        idle_sockets = [stack.enter_context(socket.socket()) for _ in range(50)]
        limits, deadline_s = resource.getrlimit(resource.RLIMIT_NOFILE), scaled(DEADLINE_S)
        next_descriptor = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_descriptor, limits[1]))
        try:
            started = time.monotonic()
            while port.server.rejection_counts["bulk_descriptors"] < 3:
                with suppress(OSError):  # also descriptors that earlier tests free late
                    while True:
                        stack.enter_context(socket.socket())
                if idle_sockets:
                    idle_sockets.pop().connect(("127.0.0.1", port.port_number))
                assert time.monotonic() - started < deadline_s
                time.sleep(0.01)
            rejected_count = port.server.rejection_counts["bulk_descriptors"]
            assert rejected_count <= (time.monotonic() - started) / ACCEPT_PAUSE_S + 2
            assert session.request(PARTIAL_SIZE, "0" * 64) == bytes(8), (
                "open connections are served"
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with port.session(authenticator) as other_session:
            assert other_session.fetch_chunk(port.digest) == CONTENT
