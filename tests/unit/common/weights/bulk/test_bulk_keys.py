"""Where each process has a key of its own, its bulk port lets in whom the mesh knows, to what their
roles allow, for as long as that is true.
"""

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
    made = Port(tmp_path / "chunks")
    yield made
    made.server.close()


# ---------------------------------------------------------------- whole processes


@pytest.mark.parametrize("encrypt", [None, False])
async def test_processes_of_two_hosts_move_chunks_and_files(
    tmp_path: Path, encrypt: bool | None
) -> None:
    clock = SystemClock()
    redis = SimulatedRedisServer(clock)
    owner = open_state_on(redis, StateClient, clock)

    async def mesh(name: str, host: str) -> Mesh:
        await mesh_doors.admit_host(owner, host)
        role = name.partition("/")[0]
        state = open_state_on(redis, StateClient, clock)
        doorway = await ProcessCredentials.register(
            name, role, host, state, SimulatedSyncRedisClient(redis), clock
        )
        made = Mesh(
            name,
            role,
            MeshDependencies(
                state=state,
                transport=ZmqTransport(keys=doorway.keys),
                clock=clock,
                random=Random.from_os_entropy(),
                host=SystemHost(),
                owns_state=True,
            ),
            settings=MeshSettings("", "", host=host, joinable=True, encrypt=encrypt),
            terms=LeaseTerms(on_lost=ends.report_lost_lease, **PATIENT),
            access=AccessRules(credentials=doorway),
        )
        await made.join(None)
        return made

    store, trainer, engine = (
        await mesh("weights", HEAD),
        await mesh("trainer/job", JOINED),
        await mesh("engine/g0", JOINED),
    )
    beside = await mesh("trainer/other", HEAD)
    store_chunks = ChunkStore(tmp_path / "chunks")
    server = serve_chunks(store, store_chunks)
    entry = RegistryEntry("weights", "weights", store.transport.address, server.address, host=HEAD)
    try:
        client = BulkClient(trainer, part_bytes=100_000)
        digest = await client.put_chunk(entry, CONTENT)
        assert await client.fetch_chunk(entry, digest) == CONTENT
        (source := tmp_path / "source").write_bytes(CONTENT[1:])
        moved = await client.put_file(entry, source)
        with PartialFile.for_file(target := tmp_path / "target", moved) as partial:
            await BulkClient(engine).fetch_to_file(entry, partial)
        assert target.read_bytes() == CONTENT[1:]
        with pytest.raises(NotAllowed, match="role engine may not put chunks of weights"):
            await BulkClient(engine).put_chunk(entry, CONTENT)
        # Files are read and written straight where the store itself says that it serves them,
        # and not where anybody who may write the registry has its row say so.
        near = BulkClient(beside)
        assert (await near.open_local_store(entry)) is not None
        (elsewhere := tmp_path / "elsewhere").mkdir()
        entry.bulk = server.address.partition("#")[0] + f"#{elsewhere}"
        kept = await near.put_chunk(entry, CONTENT[2:])
        assert store_chunks.has(kept) and not list(elsewhere.iterdir())
        strange = ChunkStore(elsewhere).write(b"of another")
        with pytest.raises(NotFound):
            await near.fetch_chunk(entry, strange)
        entry.bulk = server.address
        entry.address = engine.transport.address  # one that says that it is the store
        with pytest.raises(HandshakeFailed, match=f"is one of engine@{JOINED}, not of weights"):
            await client.fetch_chunk(entry, digest)
        entry.address = store.transport.address
        assert trainer.credentials is not None
        await mesh_doors.revoke_key(owner, trainer.credentials.row.public_key)
        assert store.credentials is not None
        store.credentials.keys.refresh_keys(1 << 40)
        with pytest.raises(HandshakeFailed, match=r"keys\?"):
            await client.fetch_chunk(entry, digest)
        with pytest.raises(HandshakeFailed, match=r"the key of this process.*is let in no more"):
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
        for one in (engine, trainer, beside, store):
            await one.leave()
        await owner.close()


# ---------------------------------------------------------------- who may what


@pytest.mark.parametrize("role", sorted(ROLES))
def test_each_role_may_what_the_table_says_and_nothing_else(port: Port, role: str) -> None:
    door = port.make_authenticator(role)
    for space in SPACES:
        may_put = role in BULK_PERMISSIONS.get(("weights", put_right(space)), ())
        for verb, may in {GET: role in BULK_PERMISSIONS["weights", MAY_GET], HAS: may_put}.items():
            with port.session(door) as session:
                if may:
                    with suppress(NotFound):
                        assert session.request(verb, port.digest, space=space) is not None
                    continue
                with pytest.raises(NotAllowed, match=f"role {role} may not .*chunks of weights"):
                    session.request(verb, port.digest, space=space)
                with pytest.raises(PeerLost):
                    session.request(verb, port.digest, space=space)
        digest = compute_digest(f"planted in {space}".encode())
        try:
            with port.session(door) as session:
                session.request(PUT, digest, f"planted in {space}".encode(), space=space)
            assert may_put
        except (NotAllowed, PeerLost):
            assert not may_put
        there = {name: port.chunks.open_space(name).has(digest) for name in SPACES}
        assert there == {name: may_put and name == space for name in SPACES}


def test_the_table_names_roles_that_there_are_and_none_puts_what_the_store_publishes() -> None:
    for (served, _), roles in BULK_PERMISSIONS.items():
        assert {served} | roles <= ROLES
    assert not any("sandbox" in roles for roles in BULK_PERMISSIONS.values())
    assert ("weights", put_right(PUBLISHED)) not in BULK_PERMISSIONS


def test_a_revoked_key_is_refused_at_its_next_request(port: Port) -> None:
    door, other = port.make_authenticator("engine"), port.make_authenticator("engine")
    with port.session(door) as session, port.session(other) as another:
        assert session.fetch_chunk(port.digest) == CONTENT
        assert another.fetch_chunk(port.digest) == CONTENT
        port.revoke(door)
        with pytest.raises(NotAllowed, match="not let in any more"):
            session.fetch_chunk(port.digest)
        assert another.fetch_chunk(port.digest) == CONTENT
    with pytest.raises(HandshakeFailed, match=r"keys\?"), port.session(door):
        pass


# ---------------------------------------------------------------- who is not let in


def test_a_stranger_gets_no_byte(port: Port) -> None:
    """Nobody's key, that of another port, and what is no hello at all."""
    address, place = port.address, port.url
    stranger, known = port.make_authenticator(""), port.make_authenticator("trainer")
    wrong_server = f"tcp://x:1#{'ab' * 32}.{'ab' * 32}"
    right = known.begin_client_handshake(address, place).make_hello()
    hellos = [
        b"",
        os.urandom(101),
        *(magic + os.urandom(97) for magic in SUITES_BY_MAGIC),
        stranger.begin_client_handshake(address, place).make_hello(),
        known.begin_client_handshake(wrong_server, place).make_hello(),
        known.begin_client_handshake(address, "tcp://127.0.0.2:1").make_hello(),
        right[:-1] + bytes([right[-1] ^ 1]),
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
                with suppress(OSError):  # it has hung up already
                    connection.sendall(hello + bytes(16) + request + bytes(200))
                    connection.shutdown(socket.SHUT_WR)
                assert read_all(connection) == b"", hello[:4]
    found = {path: path.read_bytes() for path in port.chunks.directory.rglob("*") if path.is_file()}
    assert found == before and port.lookup_count <= 1 + len(requests) * len(hellos)


@pytest.mark.parametrize("who", ["a stranger", "a server with another key"])
def test_a_wrong_key_is_said_at_once_by_who_asks(port: Port, who: str) -> None:
    address = ""
    if who == "a server with another key":
        address = f"tcp://127.0.0.1:1#{'ab' * 32}.{'ab' * 32}"
    started = time.monotonic()
    door = port.make_authenticator("trainer" if address else "")
    with pytest.raises(HandshakeFailed, match=r"keys\?"), port.session(door, address, 3600.0):
        pass
    assert time.monotonic() - started < scaled(DEADLINE_S / 2)


def test_a_recorded_hello_opens_nothing(port: Port) -> None:
    asking = port.make_authenticator("trainer").begin_client_handshake(port.address, port.url)
    hello = asking.make_hello()
    with port.connect() as honest:
        honest.sendall(hello)
        proof = asking.answer_challenge(
            honest.recv(ClientHandshake.challenge_bytes, socket.MSG_WAITALL)
        )
        assert proof is not None
    for replayed in (proof, bytes(16)):
        with port.connect() as connection:
            connection.sendall(hello + replayed + bytes(100))
            assert len(read_all(connection)) == ClientHandshake.challenge_bytes


def test_who_is_looked_up_keeps_nobody_waiting(port: Port) -> None:
    """Redis takes its time over a key: others are served meanwhile, and it is after that."""
    slow, quick = port.make_authenticator("trainer"), port.make_authenticator("engine")
    asked, answers = threading.Event(), threading.Event()
    with port.session(quick) as session:

        def wait(keys: object) -> None:
            asked.set()
            assert answers.wait(scaled(DEADLINE_S))

        port.on_lookup = wait
        entered: list[bytes] = []

        def knock() -> None:
            with port.session(slow) as late:
                entered.append(late.fetch_chunk(port.digest))

        knocking = threading.Thread(target=knock)
        knocking.start()
        assert asked.wait(scaled(DEADLINE_S))
        assert session.fetch_chunk(port.digest) == CONTENT and not entered
        answers.set()
        knocking.join(scaled(DEADLINE_S))
    assert entered == [CONTENT]


def test_while_redis_is_silent_the_known_come_in_and_others_are_to_try_again(port: Port) -> None:
    known, unknown = port.make_authenticator("engine"), port.make_authenticator("trainer")
    with port.session(known) as session:
        assert session.fetch_chunk(port.digest) == CONTENT

    def silent(keys: object) -> None:
        raise StateUnavailable("Redis does not answer")

    port.on_lookup = silent
    with port.session(known) as session:
        assert session.fetch_chunk(port.digest) == CONTENT
    with pytest.raises(HandshakeFailed) as refused, port.session(unknown):
        pass
    assert refused.value.retryable and port.server.rejection_counts["bulk_undecided"] == 1


@pytest.mark.parametrize("encrypt", [None, False, True])
@pytest.mark.parametrize("joinable", [False, True])
def test_what_is_sealed_by_default(joinable: bool, encrypt: bool | None) -> None:
    settings = MeshSettings("", "", joinable=joinable, encrypt=encrypt)
    assert settings.is_bulk_encrypted == (joinable if encrypt is None else encrypt)


# ---------------------------------------------------------------- what follows


@pytest.mark.parametrize("magic", list(SUITES_BY_MAGIC), ids=["aes", "chacha"])
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "plain"])
def test_both_suites_carry_all_there_is_to_ask(tmp_path: Path, magic: bytes, sealed: bool) -> None:
    port = Port(tmp_path / "chunks", sealed=sealed)
    door = port.make_authenticator("trainer", sealed=sealed)
    proof = door.begin_client_handshake(port.address, port.url)
    own, server = door._keys.bulk_private_key, port.keys.bulk_public_key
    proof = ClientHandshake(own, server, port.url, sealed, magic)
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
def on_the_way(
    directory: Path, most: int = 1 << 40, sealed: bool = True
) -> Iterator[tuple[Port, FaultyProxy]]:
    port = Port(directory, sealed=sealed, advertise="127.0.0.2")
    with FaultyProxy(port.port_number, most) as proxy:
        yield port, proxy
    port.server.close()


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "plain"])
def test_who_sits_on_the_way_reads_nothing_that_is_sealed(tmp_path: Path, sealed: bool) -> None:
    with (
        on_the_way(tmp_path / "chunks", sealed=sealed) as (port, proxy),
        port.session(port.make_authenticator("trainer", sealed=sealed)) as session,
    ):
        assert session.fetch_chunk(port.digest) == CONTENT
    assert (CONTENT[1000:1032] in proxy.server_bytes) == (not sealed)
    assert len(proxy.server_bytes) > len(CONTENT)


@pytest.mark.parametrize("server, client", [(True, False), (False, True)])
def test_it_is_sealed_if_either_end_wants_that(tmp_path: Path, server: bool, client: bool) -> None:
    with (
        on_the_way(tmp_path / "chunks", sealed=server) as (port, proxy),
        port.session(port.make_authenticator("trainer", sealed=client)) as session,
    ):
        assert session.fetch_chunk(port.digest) == CONTENT
    assert CONTENT[1000:1032] not in proxy.server_bytes


def test_what_is_changed_or_cut_off_on_the_way_is_missed(tmp_path: Path) -> None:
    """Wherever it happens, nobody takes what arrives for the chunk."""
    with on_the_way(tmp_path / "chunks") as (port, proxy):
        door = port.make_authenticator("trainer")
        with port.session(door) as session:
            session.fetch_chunk(port.digest)
        whole = len(proxy.server_bytes)
        for at in (*range(0, whole, whole // 20), whole - 17, whole - 1):
            proxy.corrupt_at = at
            with pytest.raises(PeerLost), port.session(door) as session:
                session.fetch_chunk(port.digest)
        proxy.corrupt_at = -1
        for most in (*range(0, whole, whole // 20), whole - 1):
            proxy.max_bytes = most
            with pytest.raises(PeerLost), port.session(door) as session:
                session.fetch_chunk(port.digest)


# ---------------------------------------------------------------- how many


def test_one_process_has_so_many_connections_and_others_find_room(port: Port) -> None:
    greedy, other = port.make_authenticator("engine"), port.make_authenticator("trainer")
    with ExitStack() as open_ones:
        for _ in range(MAX_CONNECTIONS_PER_USER):
            session = open_ones.enter_context(port.session(greedy))
            session.fetch_chunk(port.digest)
        with pytest.raises(PeerLost), port.session(greedy) as session:
            session.fetch_chunk(port.digest)
        with port.session(other) as session:
            assert session.fetch_chunk(port.digest) == CONTENT
    assert port.server.rejection_counts["bulk_crowd"] == 1


def test_who_knocks_often_pushes_only_itself_out(port: Port) -> None:
    """A stranger of another address that has just begun is not pushed out by a crowd of one."""
    with ExitStack() as held:
        slow = held.enter_context(
            socket.create_connection(
                ("127.0.0.1", port.port_number), scaled(DEADLINE_S), source_address=("127.0.0.3", 0)
            )
        )
        asking = port.make_authenticator("trainer").begin_client_handshake(port.address, port.url)
        hello = asking.make_hello()
        slow.sendall(hello[:50])
        for _ in range(3 * MAX_UNAUTHENTICATED):
            held.enter_context(port.connect())
        slow.sendall(hello[50:])
        assert len(slow.recv(ClientHandshake.challenge_bytes, socket.MSG_WAITALL)) == (
            ClientHandshake.challenge_bytes
        )
        assert port.server.connection_count <= MAX_UNAUTHENTICATED


def test_without_descriptors_the_thread_rests_and_then_goes_on(port: Port) -> None:
    door = port.make_authenticator("trainer")
    with port.session(door) as session, ExitStack() as held:
        waiting = [held.enter_context(socket.socket()) for _ in range(50)]
        limits, deadline_s = resource.getrlimit(resource.RLIMIT_NOFILE), scaled(DEADLINE_S)
        used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
        try:
            started = time.monotonic()
            while port.server.rejection_counts["bulk_descriptors"] < 3:
                with suppress(OSError):  # also what earlier tests give back by and by
                    while True:
                        held.enter_context(socket.socket())
                if waiting:
                    waiting.pop().connect(("127.0.0.1", port.port_number))
                assert time.monotonic() - started < deadline_s
                time.sleep(0.01)
            refused = port.server.rejection_counts["bulk_descriptors"]
            assert refused <= (time.monotonic() - started) / ACCEPT_PAUSE_S + 2
            assert session.request(PARTIAL_SIZE, "0" * 64) == bytes(8), "who is in is served"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with port.session(door) as another:
            assert another.fetch_chunk(port.digest) == CONTENT
