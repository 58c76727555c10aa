"""Hosts of one mesh, the keys of their processes, and addresses where they listen."""

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

GONE_S = 610.0  # a key that was not shown for 600 s is removed
HEAD, JOINED = "head-000001", "gpu2-77aa01"
SOON_S = 20.0
HELLO = Text("hello")
MAY = [method.label for method in (Talk.echo, Talk.sleep, Talk.numbers)]
Joined = Callable[..., Awaitable[Mesh]]
WIDE = 40  # ports of a range, some of which others of this host may have


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def server(clock: SystemClock) -> SimulatedRedisServer:
    return SimulatedRedisServer(clock)


@pytest.fixture
async def state(server: SimulatedRedisServer, clock: SystemClock) -> AsyncIterator[StateClient]:
    """The owner's."""
    found = open_state_on(server, StateClient, clock)
    for host in (HEAD, JOINED):
        await credentials.admit_host(found, host)
    yield found
    await found.close()


@pytest.fixture
async def joined(
    state: StateClient, server: SimulatedRedisServer, clock: SystemClock
) -> AsyncIterator[Joined]:
    """`await joined(name, host=HEAD, role=..., actor=None)` -> a mesh where a rollout may call
    `Talk.echo`; what it lost its lease for is in `lost`.
    """
    meshes: list[Mesh] = []
    ended: list[str] = []

    async def join(
        name: str, host: str = HEAD, role: str = "", actor: Talker | None = None, **about: Any
    ) -> Mesh:
        role = role or name.partition("/")[0]
        about.setdefault("on_lost", ended.append)  # in place of the end of this very process
        client = SimulatedSyncRedisClient(server)
        doorway = await ProcessCredentials.register(name, role, host, state, client, clock)
        mesh = Mesh(
            name,
            role,
            MeshDependencies(
                state=open_state_on(server, StateClient, clock),
                transport=ZmqTransport(keys=doorway.keys),
                clock=clock,
                random=Random.from_os_entropy(),
                host=SystemHost(),
                owns_state=True,
            ),
            settings=MeshSettings(redis_url="", run_root="", host=host),
            terms=LeaseTerms(renew_interval_s=0.2, **PATIENT | about),
            access=AccessRules(
                callers=dict.fromkeys(MAY, frozenset({"rollout"})), credentials=doorway
            ),
        )
        meshes.append(mesh)
        await mesh.join(actor)
        return mesh

    yield join
    for mesh in meshes:
        await mesh.leave()
    assert not ended


async def test_processes_of_two_hosts_call_each_other_by_their_roles(joined: Joined) -> None:
    await joined("engine/g0.0", JOINED, actor=Talker())
    rollout = await joined("rollout/job/0")
    assert await rollout.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO
    trainer = await joined("trainer/job")
    trainer._callers = None  # as a process that does not ask itself whether it may
    with pytest.raises(NotAllowed):
        await call_until_refused(trainer.ref("engine/g0.0"), Talk.echo, HELLO)


async def test_who_has_left_stands_at_no_door(joined: Joined, state: StateClient) -> None:
    mesh = await joined("rollout/job/0", JOINED)
    [row] = await credentials.list_credentials(state)
    assert (row.process, row.role, row.host) == ("rollout/job/0", "rollout", JOINED)
    assert row.public_key == format_key(parse_key(mesh.transport.address))
    await mesh.leave()
    assert await credentials.list_credentials(state) == []


async def test_a_process_of_an_expelled_host_does_not_start(
    joined: Joined, state: StateClient
) -> None:
    await credentials.revoke_host(state, JOINED)
    with pytest.raises(Refused, match=rf"engine/g0\.0 is not let in.*{JOINED}.*meshrl hosts"):
        await joined("engine/g0.0", JOINED)


async def test_a_host_cannot_pass_for_a_service_that_it_has_no_key_for(
    joined: Joined, state: StateClient
) -> None:
    """It may write what it likes into the registry, and its key is let in, as another role's."""
    liar = Talker()
    engine = await joined("engine/g0.0", JOINED, actor=liar)
    entry = registry.RegistryEntry("weights", "weights", engine.transport.address, host=HEAD)
    entry.incarnation = engine.incarnation
    await registry.register(state, entry, 600_000)
    rollout = await joined("rollout/job/0")
    with pytest.raises(HandshakeFailed) as refused:
        await call_until_refused(rollout.ref("weights"), Talk.echo, HELLO)
    said = str(refused.value)
    assert f"one of engine@{JOINED}, not of weights@{HEAD}" in said and "meshrl keys" in said
    assert parse_endpoint(engine.transport.address) in said
    entry.name, entry.host, entry.incarnation = f"node/{HEAD}", JOINED, "another"
    await registry.register(state, entry, 600_000)
    with pytest.raises(HandshakeFailed, match=f"not of node@{JOINED}"):
        await call_until_refused(rollout.ref(f"node/{HEAD}"), Talk.echo, HELLO)


async def test_an_agent_of_one_host_cannot_pass_for_that_of_another(
    joined: Joined, state: StateClient
) -> None:
    agent = await joined(f"node/{JOINED}", JOINED, actor=Talker())
    entry = registry.RegistryEntry(f"node/{HEAD}", "node", agent.transport.address, host=JOINED)
    entry.incarnation = agent.incarnation
    await registry.register(state, entry, 600_000)
    rollout = await joined("rollout/job/0")
    with pytest.raises(HandshakeFailed, match=f"is one of node@{JOINED}"):
        await call_until_refused(rollout.ref(f"node/{HEAD}"), Talk.echo, HELLO)


async def test_a_host_that_shows_the_keys_of_others_keeps_nobody_from_anybody(
    joined: Joined, state: StateClient
) -> None:
    """As early as it likes: before anybody has asked whose these keys are, and before their
    owners show them.
    """
    engine = await joined("engine/g0.0", actor=Talker())
    rollout = await joined("rollout/job/0")
    assert engine.credentials is not None and rollout.credentials is not None
    for mesh in (engine, rollout):
        assert mesh.credentials is not None
        row = mesh.credentials.row
        theirs = f"{MESH_PREFIX}:door:{row.role}:{HEAD}"
        await state.run_command("HDEL", theirs, row.public_key)
        await state.run_command(
            "HSET", f"{MESH_PREFIX}:door:worker:{JOINED}", row.public_key, "0 worker/w0"
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
async def test_wrong_keys_are_said_within_seconds_by_who_asks(
    joined: Joined, state: StateClient, wrong: str
) -> None:
    mesh = await joined("engine/g0.0", actor=Talker())
    rollout = await joined("rollout/job/0")
    endpoint, stranger = parse_endpoint(mesh.transport.address), KeyPair.generate().public
    expected = {
        "a key of nobody": (format_address(endpoint, stranger), r"is nobody's who is let in"),
        "no key": (endpoint, r"names no key"),
        "the port of another": (
            format_address(endpoint, parse_key(rollout.transport.address)),
            r"is one of rollout@|has not proved the key",
        ),
    }
    address, said = expected[wrong]
    entry = registry.RegistryEntry(
        "engine/g1.0", "engine", address, host=HEAD, incarnation="x" * 16
    )
    await registry.register(state, entry, 600_000)
    with pytest.raises(HandshakeFailed, match=said) as early:
        await call_until_refused(rollout.ref("engine/g1.0"), Talk.echo, HELLO)
    assert not isinstance(early.value, WrongKeys), "its lease may just not have run out"
    assert endpoint in str(early.value) and "`meshrl keys`" in str(early.value)
    assert rollout.credentials is not None
    rollout.credentials._wrong_key_since["x" * 16] -= WRONG_KEYS_AFTER_S
    with pytest.raises(WrongKeys, match=said):
        await rollout.ref("engine/g1.0").call(Talk.echo, HELLO, deadline_s=600.0)


async def test_a_listener_without_the_key_that_the_registry_has_is_told_nothing(
    joined: Joined, state: StateClient
) -> None:
    """Another process has the port of one that is gone, whose key still stands at its door."""
    engine = await joined("engine/g0.0", actor=Talker())
    rollout = await joined("rollout/job/0")
    gone = KeyPair.generate().public
    await credentials.register_key(
        state, credentials.Credential("engine", HEAD, format_key(gone), "engine/g1.0")
    )
    address = format_address(parse_endpoint(engine.transport.address), gone)
    entry = registry.RegistryEntry(
        "engine/g1.0", "engine", address, host=HEAD, incarnation="x" * 16
    )
    await registry.register(state, entry, 600_000)
    with pytest.raises(HandshakeFailed, match=f"has not proved the key {format_key(gone)[:8]}"):
        await call_until_refused(rollout.ref("engine/g1.0"), Talk.echo, HELLO)
    rollout._caller._rejected_since["x" * 16] -= WRONG_KEYS_AFTER_S
    with pytest.raises(WrongKeys):
        await rollout.ref("engine/g1.0").call(Talk.echo, HELLO, deadline_s=600.0)


async def test_a_revoked_key_is_refused_on_a_connection_that_is_open(
    joined: Joined, state: StateClient
) -> None:
    """By every process that renews its lease, and its own process ends."""
    lost: list[str] = []
    await joined("engine/g0.0", actor=Talker())
    mesh = await joined("rollout/job/0", JOINED, on_lost=lost.append)
    good = await joined("rollout/job/1", JOINED)
    assert await mesh.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO
    assert await good.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO
    assert mesh.credentials is not None
    await credentials.revoke_key(state, mesh.credentials.row.public_key)

    with pytest.raises((NotAllowed, HandshakeFailed)):
        await call_until_refused(mesh.ref("engine/g0.0"), Talk.echo, HELLO)
    with pytest.raises(HandshakeFailed, match=r"key of this process.* is let in no more"):
        await call_until_refused(mesh.ref("engine/g0.0"), Talk.echo, HELLO)
    await until(lambda: lost and "revoked" in lost[0], SOON_S)
    assert await good.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO


async def test_what_runs_for_a_revoked_process_ends(joined: Joined, state: StateClient) -> None:
    """A call that would have been answered, and a stream that would have gone on."""
    lost: list[str] = []
    talker = Talker()
    await joined("engine/g0.0", actor=talker)
    mesh = await joined("rollout/job/0", JOINED, on_lost=lost.append)
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


async def test_nobody_of_an_expelled_host_is_called_any_more(
    joined: Joined, state: StateClient
) -> None:
    """Also over a connection that is open, to a process that goes on all the same."""
    lost: list[str] = []
    talker = Talker()
    await joined("engine/g0.0", JOINED, actor=talker, on_lost=lost.append)
    rollout = await joined("rollout/job/0")
    await rollout.ref("engine/g0.0").call(Talk.echo, HELLO)
    await credentials.revoke_host(state, JOINED)
    await until(lambda: lost and "expelled" in lost[0], SOON_S)

    with pytest.raises(HandshakeFailed, match="nobody's who is let in"):
        await call_until_refused(rollout.ref("engine/g0.0"), Talk.echo, HELLO)


async def test_a_process_without_a_lease_keeps_its_key_at_its_door() -> None:
    """As a command that follows a log for hours does, and asks nobody for a name."""
    time = HandClock()
    server, clock = SimulatedRedisServer(time), cast(Clock, time)
    state = open_state_on(server, StateClient, time)
    await credentials.admit_host(state, HEAD)

    async def entered(name: str) -> ProcessCredentials:
        client = SimulatedSyncRedisClient(server)
        return await ProcessCredentials.register(name, "person", HEAD, state, client, clock)

    staying, gone = await entered("person/1"), await entered("person/2")
    began = time.now
    while time.now < began + GONE_S:
        time.now += REREGISTER_S / 2
        await staying.refresh()
    await entered("person/3")
    assert {row.process for row in await credentials.list_credentials(state)} == {
        "person/1",
        "person/3",
    }
    await credentials.revoke_key(state, staying.row.public_key)
    time.now += 2 * REREGISTER_S
    with pytest.raises(Refused, match="was revoked"):
        await staying.refresh()
    assert gone.row.public_key not in {
        row.public_key for row in await credentials.list_credentials(state)
    }


async def test_while_redis_is_silent_a_stranger_waits_and_the_known_go_on(
    joined: Joined, server: SimulatedRedisServer
) -> None:
    engine = await joined("engine/g0.0", actor=Talker())
    known, other = await joined("rollout/job/0"), await joined("rollout/job/1")
    await known.ref("engine/g0.0").call(Talk.echo, HELLO)
    assert engine.credentials is not None and other.credentials is not None
    await other._directory.find("engine/g0.0", other.clock.monotonic() + scaled(SOON_S))
    server.faults.is_unreachable = True
    waiting = asyncio.create_task(
        other.ref("engine/g0.0").call(Talk.echo, HELLO, deadline_s=scaled(60.0))
    )
    await until(lambda: engine.transport.rejected_connections.get("undecided"), SOON_S)
    assert await known.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO
    known.transport.disconnect(engine.transport.address)
    assert await known.ref("engine/g0.0").call(Talk.echo, HELLO) == HELLO, "its key is known"
    assert not waiting.done()
    server.faults.is_unreachable = False
    assert await waiting == HELLO


async def test_each_process_takes_the_first_free_port_of_a_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        low = int(taken.getsockname()[1])
        bind = f"tcp://127.0.0.1:{low}-{low + WIDE}"
        async with AsyncExitStack() as opened:
            found = []
            for _ in range(3):
                transport = ZmqTransport(bind)
                opened.push_async_callback(transport.close)
                found.append(int(transport.address.rpartition(":")[2]))
        assert low < found[0] < found[1] < found[2] <= low + WIDE


async def test_a_range_without_a_free_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"cannot listen on {bind}.*range.*each process"):
            ZmqTransport(bind)


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:70000", "tcp://127.0.0.1:9-8", "tcp://127.0.0.1"]
)
async def test_what_is_no_place_to_listen_at_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match="LOW-HIGH"):
        ZmqTransport(bind)


async def test_a_host_of_ipv6_stands_in_brackets() -> None:
    """With a key behind it, and messages over it."""
    whose: dict[str, tuple[str, ...]] = {}

    def keys() -> ProcessKeys:
        made = ProcessKeys(lambda asked: [whose.get(key, ()) for key in asked], lambda: 0.0)
        whose[made.public_key_text] = ("engine@here",)
        return made

    try:
        answering = ZmqTransport("tcp://[::1]:*", keys=keys())
    except ConfigError:
        pytest.skip("this host has no IPv6")
    asking = ZmqTransport("tcp://[::1]:*", keys=keys())
    heard: asyncio.Queue[tuple[list[object], str]] = asyncio.Queue()
    answering.start(
        lambda peer, frames, role: heard.put_nowait(([bytes(f) for f in frames], role)),
        lambda *_: None,
        lambda *_: None,
    )
    asking.start(lambda *_: None, lambda *_: None, lambda *_: None)
    assert parse_endpoint(answering.address).startswith("tcp://[::1]:")
    assert len(parse_key(answering.address)) == 40
    asking.send(answering.address, [b"header", b"body"])
    async with asyncio.timeout(scaled(SOON_S)):
        assert await heard.get() == ([b"header", b"body"], "engine")
    await asking.close()
    await answering.close()


async def test_bulk_bytes_and_metrics_go_over_ipv6_too(join: Join, tmp_path: Path) -> None:
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
    place = urlsplit(metrics.address)
    assert place.hostname == "::1"
    reader, writer = await asyncio.open_connection("::1", place.port)
    writer.write(b"GET /livez HTTP/1.0\r\n\r\n")
    assert (await reader.read()).endswith(b"\r\n\r\nok\n")
    writer.close()
    metrics.close()
