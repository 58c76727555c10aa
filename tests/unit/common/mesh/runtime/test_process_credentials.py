"""Credentials of mesh processes on several hosts, and their listen addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from meshrl.common.base.clock import Clock, SystemClock
from meshrl.common.base.errors import ConfigError, HandshakeFailed, NotAllowed, Refused, WrongKeys
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.calls.caller import WRONG_KEYS_AFTER_S
from meshrl.common.mesh.runtime.dependencies import AccessRules, LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.process_credentials import REREGISTER_S, ProcessCredentials
from meshrl.common.mesh.telemetry.metrics_endpoint import MetricsEndpoint, make_health_page
from meshrl.common.mesh.transport.address import (
    format_address,
    format_key,
    parse_endpoint,
    parse_key,
)
from meshrl.common.mesh.transport.keys import KeyPair, ProcessKeys
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.state import registry
from meshrl.common.state.hosts import credentials
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX
from meshrl.common.state.registry import RegistryEntry
from meshrl.common.weights.bulk.authenticators import InProcessAuthenticator
from meshrl.common.weights.bulk.port import BulkClient, BulkServer, ChunkStore
from meshrl.sim.redis.client import SimulatedSyncRedisClient
from meshrl.sim.redis.server import SimulatedRedisServer
from meshrl.sim.redis.simulated_state import open_state_on
from tests.contract.state.state_bench import HandClock
from tests.load import scaled
from tests.meshes import PATIENT
from tests.unit.common.mesh.runtime.talking import (
    Join,
    Number,
    Talk,
    Talker,
    Text,
    call_until_refused,
    until,
)

EXPIRED_S = 610.0  # a key that was not renewed for 600 s is removed
HEAD, JOINED = "head-000001", "gpu2-77aa01"
SOON_S = 20.0
HELLO = Text("hello")
ROLLOUT_METHODS = [method.label for method in (Talk.echo, Talk.sleep, Talk.numbers)]
Joined = Callable[..., Awaitable[Mesh]]
PORT_RANGE = 40  # ports of a range, some of which other processes may use


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def server(clock: SystemClock) -> SimulatedRedisServer:
    return SimulatedRedisServer(clock)


@pytest.fixture
async def state(server: SimulatedRedisServer, clock: SystemClock) -> AsyncIterator[StateClient]:
    """Yield the owner's state client."""
    client = open_state_on(server, StateClient, clock)
    for host in (HEAD, JOINED):
        await credentials.admit_host(client, host)
    yield client
    await client.close()


@pytest.fixture
async def join_as(
    state: StateClient, server: SimulatedRedisServer, clock: SystemClock
) -> AsyncIterator[Joined]:
    """Return `joined`: `await joined(name, host=HEAD, role=..., actor=None)` opens a mesh where
    rollouts may call `Talk.echo`.
    """
    meshes: list[Mesh] = []
    lost_leases: list[str] = []

    async def join_mesh(
        name: str, host: str = HEAD, role: str = "", actor: Talker | None = None, **lease_terms: Any
    ) -> Mesh:
        role = role or name.partition("/")[0]
        lease_terms.setdefault("on_lost", lost_leases.append)  # instead of the exit of this process
        client = SimulatedSyncRedisClient(server)
        process_credentials = await ProcessCredentials.register(
            name, role, host, state, client, clock
        )
        mesh = Mesh(
            name,
            role,
            MeshDependencies(
                state=open_state_on(server, StateClient, clock),
                transport=ZmqTransport(keys=process_credentials.keys),
                clock=clock,
                random=Random.from_os_entropy(),
                host=SystemHost(),
                owns_state=True,
            ),
            settings=MeshSettings(redis_url="", run_root="", host=host),
            terms=LeaseTerms(renew_interval_s=0.2, **PATIENT | lease_terms),
            access=AccessRules(
                callers=dict.fromkeys(ROLLOUT_METHODS, frozenset({"rollout"})),
                credentials=process_credentials,
            ),
        )
        meshes.append(mesh)
        await mesh.join(actor)
        return mesh

    yield join_mesh
    for mesh in meshes:
        await mesh.leave()
    assert not lost_leases


async def test_processes_on_two_hosts_call_each_other_by_role(join_as: Joined) -> None:
    await join_as("engine/g0.0", JOINED, actor=Talker())
    rollout = await join_as("rollout/job/0")
    assert await rollout.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO
    trainer = await join_as("trainer/job")
    trainer._callers = None  # as a process that does not check permissions itself
    with pytest.raises(NotAllowed):
        await call_until_refused(trainer.ref("engine/g0.0"), Talk.echo, HELLO)


async def test_leaving_withdraws_the_key(join_as: Joined, state: StateClient) -> None:
    mesh = await join_as("rollout/job/0", JOINED)
    [row] = await credentials.list_credentials(state)
    assert (row.process, row.role, row.host) == ("rollout/job/0", "rollout", JOINED)
    assert row.public_key == format_key(parse_key(mesh.transport.address))
    await mesh.leave()
    assert await credentials.list_credentials(state) == []


async def test_process_of_an_expelled_host_cannot_join(join_as: Joined, state: StateClient) -> None:
    await credentials.revoke_host(state, JOINED)
    with pytest.raises(
        Refused, match=rf"the mesh does not admit engine/g0\.0.*{JOINED}.*meshrl hosts"
    ):
        await join_as("engine/g0.0", JOINED)


async def test_host_cannot_impersonate_a_service_without_its_key(
    join_as: Joined, state: StateClient
) -> None:
    """Check an impostor that rewrites the registry, whose own valid key has another role."""
    impostor = Talker()
    engine = await join_as("engine/g0.0", JOINED, actor=impostor)
    entry = registry.RegistryEntry("weights", "weights", engine.transport.address, host=HEAD)
    entry.incarnation = engine.incarnation
    await registry.register(state, entry, 600_000)
    rollout = await join_as("rollout/job/0")
    with pytest.raises(HandshakeFailed) as refused:
        await call_until_refused(rollout.ref("weights"), Talk.echo, HELLO)
    message = str(refused.value)
    assert (
        f"belongs to engine@{JOINED}, not to weights@{HEAD}" in message and "meshrl keys" in message
    )
    assert parse_endpoint(engine.transport.address) in message
    entry.name, entry.host, entry.incarnation = f"node/{HEAD}", JOINED, "another"
    await registry.register(state, entry, 600_000)
    with pytest.raises(HandshakeFailed, match=f"not to node@{JOINED}"):
        await call_until_refused(rollout.ref(f"node/{HEAD}"), Talk.echo, HELLO)


async def test_node_agent_cannot_impersonate_another_hosts_agent(
    join_as: Joined, state: StateClient
) -> None:
    agent = await join_as(f"node/{JOINED}", JOINED, actor=Talker())
    entry = registry.RegistryEntry(f"node/{HEAD}", "node", agent.transport.address, host=JOINED)
    entry.incarnation = agent.incarnation
    await registry.register(state, entry, 600_000)
    rollout = await join_as("rollout/job/0")
    with pytest.raises(HandshakeFailed, match=f"belongs to node@{JOINED}"):
        await call_until_refused(rollout.ref(f"node/{HEAD}"), Talk.echo, HELLO)


async def test_registering_other_processes_keys_blocks_no_connection(
    join_as: Joined, state: StateClient
) -> None:
    """Check registrations of other processes' keys, made before any lookup and before their owners
    register.
    """
    engine = await join_as("engine/g0.0", actor=Talker())
    rollout = await join_as("rollout/job/0")
    assert engine.credentials is not None and rollout.credentials is not None
    for mesh in (engine, rollout):
        assert mesh.credentials is not None
        row = mesh.credentials.row
        owner_row = f"{MESH_PREFIX}:credentials:{row.role}:{HEAD}"
        await state.run_command("HDEL", owner_row, row.public_key)
        await state.run_command(
            "HSET", f"{MESH_PREFIX}:credentials:worker:{JOINED}", row.public_key, "0 worker/w0"
        )
        assert mesh.credentials.keys.refresh_key(row.public_key) == (f"worker@{JOINED}",)
    assert rollout.credentials.keys.find_holders(engine.credentials.row.public_key) == (
        f"worker@{JOINED}",
    )
    for mesh in (engine, rollout):
        assert mesh.credentials is not None
        await credentials.register_key(state, mesh.credentials.row)
    assert (
        await rollout.ref("engine/g0.0").call(Talk.echo, HELLO, deadline_s=scaled(SOON_S)) == HELLO
    )


@pytest.mark.parametrize("wrong", ["a key of nobody", "no key", "the port of another"])
async def test_caller_reports_wrong_keys_within_seconds(
    join_as: Joined, state: StateClient, wrong: str
) -> None:
    mesh = await join_as("engine/g0.0", actor=Talker())
    rollout = await join_as("rollout/job/0")
    endpoint, unknown_key = parse_endpoint(mesh.transport.address), KeyPair.generate().public
    expected = {
        "a key of nobody": (
            format_address(endpoint, unknown_key),
            r"belongs to no admitted process",
        ),
        "no key": (endpoint, r"contains no key"),
        "the port of another": (
            format_address(endpoint, parse_key(rollout.transport.address)),
            r"belongs to rollout@|did not prove its registered key",
        ),
    }
    address, pattern = expected[wrong]
    entry = registry.RegistryEntry(
        "engine/g1.0", "engine", address, host=HEAD, incarnation="x" * 16
    )
    await registry.register(state, entry, 600_000)
    with pytest.raises(HandshakeFailed, match=pattern) as early:
        await call_until_refused(rollout.ref("engine/g1.0"), Talk.echo, HELLO)
    assert not isinstance(early.value, WrongKeys), "its lease may just not have run out"
    assert endpoint in str(early.value) and "`meshrl keys`" in str(early.value)
    assert rollout.credentials is not None
    rollout.credentials._wrong_key_since["x" * 16] -= WRONG_KEYS_AFTER_S
    with pytest.raises(WrongKeys, match=pattern):
        await rollout.ref("engine/g1.0").call(Talk.echo, HELLO, deadline_s=600.0)


async def test_listener_without_the_registered_key_receives_no_call(
    join_as: Joined, state: StateClient
) -> None:
    """Check a process on the port of an exited one whose key is still registered."""
    engine = await join_as("engine/g0.0", actor=Talker())
    rollout = await join_as("rollout/job/0")
    old_key = KeyPair.generate().public
    await credentials.register_key(
        state, credentials.Credential("engine", HEAD, format_key(old_key), "engine/g1.0")
    )
    address = format_address(parse_endpoint(engine.transport.address), old_key)
    entry = registry.RegistryEntry(
        "engine/g1.0", "engine", address, host=HEAD, incarnation="x" * 16
    )
    await registry.register(state, entry, 600_000)
    with pytest.raises(
        HandshakeFailed, match=f"did not prove its registered key {format_key(old_key)[:8]}"
    ):
        await call_until_refused(rollout.ref("engine/g1.0"), Talk.echo, HELLO)
    rollout._caller._rejected_since["x" * 16] -= WRONG_KEYS_AFTER_S
    with pytest.raises(WrongKeys):
        await rollout.ref("engine/g1.0").call(Talk.echo, HELLO, deadline_s=600.0)


async def test_revoked_key_is_rejected_on_an_open_connection(
    join_as: Joined, state: StateClient
) -> None:
    """Check that every process that renews its lease rejects the key, and that the key's own
    process ends.
    """
    lost_reasons: list[str] = []
    await join_as("engine/g0.0", actor=Talker())
    mesh = await join_as("rollout/job/0", JOINED, on_lost=lost_reasons.append)
    other = await join_as("rollout/job/1", JOINED)
    assert await mesh.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO
    assert await other.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO
    assert mesh.credentials is not None
    await credentials.revoke_key(state, mesh.credentials.row.public_key)

    with pytest.raises((NotAllowed, HandshakeFailed)):
        await call_until_refused(mesh.ref("engine/g0.0"), Talk.echo, HELLO)
    with pytest.raises(HandshakeFailed, match=r"key of this process.* is no longer admitted"):
        await call_until_refused(mesh.ref("engine/g0.0"), Talk.echo, HELLO)
    await until(lambda: lost_reasons and "revoked" in lost_reasons[0], SOON_S)
    assert await other.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO


async def test_running_calls_and_streams_of_a_revoked_process_end(
    join_as: Joined, state: StateClient
) -> None:
    """Check that a running call and a running stream end."""
    lost_reasons: list[str] = []
    talker = Talker()
    await join_as("engine/g0.0", actor=talker)
    mesh = await join_as("rollout/job/0", JOINED, on_lost=lost_reasons.append)
    call = asyncio.create_task(mesh.ref("engine/g0.0").call(Talk.sleep, Number(600)))
    numbers = mesh.ref("engine/g0.0").stream(Talk.numbers, Number(1 << 30))
    await anext(numbers)
    await until(lambda: talker.sleeping, SOON_S)
    assert mesh.credentials is not None
    await credentials.revoke_key(state, mesh.credentials.row.public_key)
    await asyncio.wait_for(talker.closed.wait(), scaled(SOON_S))
    await asyncio.wait_for(talker.cancelled.wait(), scaled(SOON_S))
    assert not talker.sleeping
    with pytest.raises((NotAllowed, HandshakeFailed)):
        await asyncio.wait_for(call, scaled(SOON_S))
    await numbers.aclose()


async def test_processes_of_an_expelled_host_are_not_called(
    join_as: Joined, state: StateClient
) -> None:
    """Check that calls also end over an open connection to a process that still runs."""
    lost_reasons: list[str] = []
    talker = Talker()
    await join_as("engine/g0.0", JOINED, actor=talker, on_lost=lost_reasons.append)
    rollout = await join_as("rollout/job/0")
    await rollout.ref("engine/g0.0").call(Talk.echo, HELLO)
    await credentials.revoke_host(state, JOINED)
    await until(lambda: lost_reasons and "expelled" in lost_reasons[0], SOON_S)

    with pytest.raises(HandshakeFailed, match="belongs to no admitted process"):
        await call_until_refused(rollout.ref("engine/g0.0"), Talk.echo, HELLO)


async def test_process_without_a_lease_keeps_its_key_registered() -> None:
    """Check a process that holds no name, such as a command that follows a log for hours."""
    test_clock = HandClock()
    server, clock = SimulatedRedisServer(test_clock), cast(Clock, test_clock)
    state = open_state_on(server, StateClient, test_clock)
    await credentials.admit_host(state, HEAD)

    async def register_process(name: str) -> ProcessCredentials:
        client = SimulatedSyncRedisClient(server)
        return await ProcessCredentials.register(name, "person", HEAD, state, client, clock)

    active, expired = await register_process("person/1"), await register_process("person/2")
    start_s = test_clock.now
    while test_clock.now < start_s + EXPIRED_S:
        test_clock.now += REREGISTER_S / 2
        await active.refresh()
    await register_process("person/3")
    assert {row.process for row in await credentials.list_credentials(state)} == {
        "person/1",
        "person/3",
    }
    await credentials.revoke_key(state, active.row.public_key)
    test_clock.now += 2 * REREGISTER_S
    with pytest.raises(Refused, match="was revoked"):
        await active.refresh()
    assert expired.row.public_key not in {
        row.public_key for row in await credentials.list_credentials(state)
    }


async def test_known_peers_continue_while_redis_is_unreachable(
    join_as: Joined, server: SimulatedRedisServer
) -> None:
    engine = await join_as("engine/g0.0", actor=Talker())
    known_mesh, other = await join_as("rollout/job/0"), await join_as("rollout/job/1")
    await known_mesh.ref("engine/g0.0").call(Talk.echo, HELLO)
    assert engine.credentials is not None and other.credentials is not None
    await other._directory.find("engine/g0.0", other.clock.monotonic() + scaled(SOON_S))
    server.faults.is_unreachable = True
    pending_call = asyncio.create_task(
        other.ref("engine/g0.0").call(Talk.echo, HELLO, deadline_s=scaled(60.0))
    )
    await until(lambda: engine.transport.rejected_connections.get("undecided"), SOON_S)
    assert await known_mesh.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO
    known_mesh.transport.disconnect(engine.transport.address)
    assert await known_mesh.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO, "its key is known"
    assert not pending_call.done()
    server.faults.is_unreachable = False
    assert await pending_call == HELLO


async def test_each_transport_binds_the_first_free_port_of_a_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        first_port = int(occupied.getsockname()[1])
        bind = f"tcp://127.0.0.1:{first_port}-{first_port + PORT_RANGE}"
        async with AsyncExitStack() as transports:
            ports = []
            for _ in range(3):
                transport = ZmqTransport(bind)
                transports.push_async_callback(transport.close)
                ports.append(int(transport.address.rpartition(":")[2]))
        assert first_port < ports[0] < ports[1] < ports[2] <= first_port + PORT_RANGE


async def test_port_range_without_a_free_port_is_rejected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        bind = f"tcp://127.0.0.1:{occupied.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"cannot listen on {bind}.*range.*each process"):
            ZmqTransport(bind)


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:70000", "tcp://127.0.0.1:9-8", "tcp://127.0.0.1"]
)
async def test_invalid_listen_addresses_are_rejected(bind: str) -> None:
    with pytest.raises(ConfigError, match="LOW-HIGH"):
        ZmqTransport(bind)


async def test_ipv6_hosts_are_written_in_brackets() -> None:
    """Check addresses with a key, and messages over them."""
    owners: dict[str, tuple[str, ...]] = {}

    def make_keys() -> ProcessKeys:
        process_keys = ProcessKeys(
            lambda asked: [owners.get(key, ()) for key in asked], lambda: 0.0
        )
        owners[process_keys.public_key_text] = ("engine@here",)
        return process_keys

    try:
        responder = ZmqTransport("tcp://[::1]:*", keys=make_keys())
    except ConfigError:
        pytest.skip("this host has no IPv6")
    requester = ZmqTransport("tcp://[::1]:*", keys=make_keys())
    received: asyncio.Queue[tuple[list[object], str]] = asyncio.Queue()
    responder.start(
        lambda peer, frames, role: received.put_nowait(([bytes(f) for f in frames], role)),
        lambda *_: None,
        lambda *_: None,
    )
    requester.start(lambda *_: None, lambda *_: None, lambda *_: None)
    assert parse_endpoint(responder.address).startswith("tcp://[::1]:")
    assert len(parse_key(responder.address)) == 40
    requester.send(responder.address, [b"header", b"body"])
    async with asyncio.timeout(scaled(SOON_S)):
        assert await received.get() == ([b"header", b"body"], "engine")
    await requester.close()
    await responder.close()


async def test_bulk_port_and_metrics_endpoint_support_ipv6(join: Join, tmp_path: Path) -> None:
    settings = MeshSettings("memory://", "", host="", secret="5e" * 32)
    try:
        server = BulkServer(
            ChunkStore(tmp_path),
            SystemHost(),
            "tcp://[::1]:*",
            authenticator=InProcessAuthenticator(),
        )
    except ConfigError:
        pytest.skip("this host has no IPv6")
    assert server.address.startswith("tcp://[::1]:")
    client = BulkClient(await join("client", settings=settings))
    entry = RegistryEntry("store", "test", bulk=server.address, host="another")
    digest = await client.put_chunk(entry, b"chunk")
    assert await client.fetch_chunk(entry, digest) == b"chunk"
    server.close()
    metrics = MetricsEndpoint("[::1]:*", "", SystemHost(), {"/livez": make_health_page(lambda: "")})
    endpoint = urlsplit(metrics.address)
    assert endpoint.hostname == "::1"
    reader, writer = await asyncio.open_connection("::1", endpoint.port)
    writer.write(b"GET /livez HTTP/1.0\r\n\r\n")
    assert (await reader.read()).endswith(b"\r\n\r\nok\n")
    writer.close()
    metrics.close()
