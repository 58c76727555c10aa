"""Who has no key of the mesh is not answered, and who has one may ask what its role may ask."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
import zmq

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.encoding.messages import encode
from meshrl.common.base.errors import ConfigError, HandshakeFailed, MeshError, NotAllowed
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.calls.caller import WRONG_KEYS_AFTER_S
from meshrl.common.mesh.runtime.calls.server import MAX_RUNNING_PER_PEER
from meshrl.common.mesh.runtime.dependencies import AccessRules, LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.transport.address import parse_endpoint
from meshrl.common.mesh.transport.keys import KeyPair, ProcessKeys
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.mesh.wire.frames import CALL, pack_header, unpack_error
from meshrl.common.state import registry
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.meshes import PATIENT, begun, curve, keys_of
from tests.unit.common.mesh.runtime.talking import (
    Join,
    Number,
    Talk,
    Talker,
    Text,
    call_until_refused,
    cancel,
    until,
)

OTHER = "another mesh"
HELLO = encode(Text("hello"))[0]
SOON_S = 20.0

Guarded = Callable[[str, str, Talker | None], Coroutine[Any, Any, Mesh]]


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    """`await guarded(name, role, actor)` -> a mesh where a rollout may call `Talk.echo`, and
    `Talk.sleep`.
    """
    clock = SystemClock()
    state, callers = (
        open_simulated_state(clock),
        {method.label: frozenset({"rollout"}) for method in (Talk.echo, Talk.sleep)},
    )
    meshes: list[Mesh] = []

    async def joined(name: str, role: str, actor: Talker | None = None) -> Mesh:
        mesh = Mesh(
            name,
            role,
            MeshDependencies(
                state=state,
                transport=ZmqTransport(keys=keys_of(role)),
                clock=clock,
                random=Random.from_os_entropy(),
                host=SystemHost(),
            ),
            terms=LeaseTerms(**PATIENT),
            access=AccessRules(callers=callers),
        )
        meshes.append(mesh)
        await mesh.join(actor)
        return mesh

    yield joined
    for mesh in meshes:
        await mesh.leave()
    await state.close()


class Caller:
    """A socket that sends what it likes, with the keys that it was given."""

    def __init__(self, address: str, keys: ProcessKeys | None, identity: bytes = b"") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        if identity:
            self._socket.set(zmq.ROUTING_ID, identity)
        if keys is not None:
            curve(self._socket, keys, address)
        self._socket.connect(parse_endpoint(address))

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def send(self, actor: str, method: str, target: str, call_id: int = 1) -> None:
        header = pack_header(CALL, call_id, actor, method, "someone", target, 60_000)
        self._socket.send(begun(header, HELLO))

    def send_raw(self, frame: bytes) -> None:
        self._socket.send(frame)

    @property
    def answered(self) -> bool:
        return bool(self._socket.poll(0))

    async def answer(self, within_s: float = SOON_S) -> tuple[str, str]:
        """(code, text) of the error that comes."""
        await until(lambda: self.answered, within_s)
        answer = self._socket.recv()
        return unpack_error(answer[2 + int.from_bytes(answer[:2], "little") :])


class WrongServer(ProcessKeys):
    """Keys that take every server for another one."""

    def find_expected_key(self, address: str) -> bytes:
        return KeyPair.generate().public


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (None, "handshake"),
        (keys_of("rollout", OTHER), "keys"),
        (WrongServer(lambda asked: [], time.monotonic), "handshake"),
    ],
    ids=["no keys", "another mesh's keys", "another server's key"],
)
async def test_a_stranger_is_not_answered(
    guarded: Guarded, keys: ProcessKeys | None, why: str
) -> None:
    mesh = await guarded("a", "engine", Talker())
    friend = (await guarded("b", "rollout", None)).ref("a")
    with Caller(mesh.transport.address, keys) as stranger:
        stranger.send("a", "echo", mesh.incarnation)
        await until(lambda: mesh.transport.rejected_connections.get(why), SOON_S)
        assert await friend.call(Talk.echo, Text("friend")) == Text("friend")
        assert not stranger.answered
    await until(lambda: f"refused_{why}" in mesh.telemetry.counters, SOON_S)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (None, "names no key.*`meshrl down`"),
        (keys_of("engine", OTHER), "wrong keys.*`meshrl keys`"),
    ],
    ids=["open", "another mesh's"],
)
async def test_a_call_to_a_process_with_other_keys_says_so(
    guarded: Guarded, keys: ProcessKeys | None, why: str
) -> None:
    mesh = await guarded("b", "rollout", None)
    caller = mesh.ref("a")
    other = ZmqTransport(keys=keys)
    heard: list[object] = []
    other.start(lambda *all: heard.append(all), lambda *_: None, lambda *_: None)
    entry = registry.RegistryEntry("a", "engine", address=other.address, incarnation="x" * 16)
    await registry.register(mesh.state, entry, 60_000)
    with pytest.raises(HandshakeFailed, match=why):
        await call_until_refused(caller, Talk.echo, Text("secret"))
    assert not heard
    await other.close()


async def test_after_a_while_it_is_no_restart_that_explains_other_keys(guarded: Guarded) -> None:
    mesh = await guarded("b", "rollout", None)
    caller = mesh.ref("a")
    other = ZmqTransport(keys=keys_of("engine", OTHER))
    other.start(lambda *_: None, lambda *_: None, lambda *_: None)
    entry = registry.RegistryEntry("a", "engine", address=other.address, incarnation="x" * 16)
    await registry.register(mesh.state, entry, 60_000)
    with pytest.raises(HandshakeFailed) as first:
        await call_until_refused(caller, Talk.echo, Text(""))
    assert first.value.retryable
    mesh._caller._rejected_since[entry.incarnation] -= WRONG_KEYS_AFTER_S
    with pytest.raises(HandshakeFailed) as later:
        await caller.call(Talk.echo, Text(""), deadline_s=3600.0)  # it does not go on until then
    assert not later.value.retryable
    await other.close()


async def test_who_does_not_answer_at_all_has_refused_nothing(guarded: Guarded) -> None:
    """It stands still, and may go on: that is no matter of keys, however long it takes."""
    mesh = await guarded("b", "rollout", None)
    assert isinstance(mesh.transport, ZmqTransport)
    mesh.transport._handshake_timeout_s = 0.5
    with socket.create_server(("127.0.0.1", 0)) as still:
        place = keys_of("engine").make_address(f"tcp://127.0.0.1:{still.getsockname()[1]}")
        entry = registry.RegistryEntry("a", "engine", address=place, incarnation="x" * 16)
        await registry.register(mesh.state, entry, 60_000)
        mesh._caller._rejected_since[entry.incarnation] = -WRONG_KEYS_AFTER_S
        with pytest.raises(MeshError) as heard:
            await mesh.ref("a").call(Talk.echo, Text(""), deadline_s=3.0)
        assert heard.value.retryable and not isinstance(heard.value, HandshakeFailed)


async def test_who_squats_a_port_learns_nothing(guarded: Guarded) -> None:
    """All that it is sent without knowing a key is a greeting, in which nothing is said."""
    mesh = await guarded("b", "rollout", None)
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        squatter.settimeout(scaled(SOON_S))
        place = f"tcp://127.0.0.1:{squatter.getsockname()[1]}"
        address = keys_of("engine").make_address(place)
        entry = registry.RegistryEntry(
            "a", "engine", address=address, incarnation="the one and only"
        )
        await registry.register(mesh.state, entry, 60_000)
        call = asyncio.create_task(mesh.ref("a").call(Talk.echo, Text("precious")))
        accepted, _ = await asyncio.to_thread(squatter.accept)
        accepted.settimeout(scaled(SOON_S))
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00CURVE".ljust(22, b"\0") + bytes(32)
        accepted.sendall(greeting)  # as a process of a mesh begins
        got = b""
        while len(got) < 64 + 202:  # a greeting, and HELLO with its two octets before
            got += await asyncio.to_thread(accepted.recv, 4096)
        for word in (b"precious", b"the one and only", b"echo", b"rollout"):
            assert word not in got
        call.cancel()
        accepted.close()


@pytest.mark.parametrize(
    ("actor", "method", "right"),
    [("a", "echo", True), ("a", "echo", False), ("z", "echo", True), ("a", "no such", True)],
)
async def test_who_may_not_call_hears_the_same_whatever_is_wrong(
    guarded: Guarded, actor: str, method: str, right: bool
) -> None:
    talker = Talker()
    mesh = await guarded("a", "engine", talker)
    with Caller(mesh.transport.address, keys_of("trainer")) as member:
        member.send(actor, method, mesh.incarnation if right else "other")
        assert await member.answer() == ("not_allowed", "not allowed")
    assert mesh.telemetry.counters["refused_not_allowed"] == 1


async def test_who_may_call_is_never_told_an_incarnation(guarded: Guarded) -> None:
    mesh = await guarded("a", "engine", Talker())
    with Caller(mesh.transport.address, keys_of("rollout")) as member:
        member.send("a", "echo", "an earlier start")
        code, text = await member.answer()
    assert code == "stale_incarnation" and mesh.incarnation not in text


async def test_a_request_that_comes_early_is_refused_at_once_if_it_may_not(
    guarded: Guarded,
) -> None:
    starting = Talker(start_s=3600.0)
    joining = asyncio.create_task(guarded("a", "engine", starting))
    asking = await guarded("b", "trainer", None)
    entry = None
    while entry is None or not entry.alive:
        entry = await registry.lookup(asking.state, "a")
        await asyncio.sleep(0.01)
    with Caller(entry.address, keys_of("trainer")) as member:
        member.send("a", "echo", entry.incarnation)
        assert (await member.answer())[0] == "not_allowed"
    await cancel(joining)


async def test_one_requester_cannot_keep_all_others_out(guarded: Guarded) -> None:
    """However many calls it has sent, and does not wait for."""
    mesh = await guarded("a", "engine", Talker())
    friend = (await guarded("b", "rollout", None)).ref("a")
    body = encode(Number(600))[0]
    with Caller(mesh.transport.address, keys_of("rollout")) as greedy:

        def flood() -> None:
            for call_id in range(1, MAX_RUNNING_PER_PEER + 2):
                header = pack_header(CALL, call_id, "a", "sleep", "one", mesh.incarnation, 600_000)
                greedy.send_raw(begun(header, body))

        await asyncio.to_thread(flood)
        assert await greedy.answer() == (
            "overloaded",
            f"a has {MAX_RUNNING_PER_PEER} calls of this process under way",
        )
        assert mesh.running_calls == MAX_RUNNING_PER_PEER
        assert await friend.call(Talk.echo, Text("friend")) == Text("friend")
        mesh._server._running[next(iter(mesh._server._running))].cancel(None)
        await until(lambda: mesh.running_calls < MAX_RUNNING_PER_PEER, SOON_S)
        greedy.send_raw(
            begun(pack_header(CALL, 9999, "a", "sleep", "two", mesh.incarnation, 600_000), body)
        )
        await until(lambda: mesh.running_calls == MAX_RUNNING_PER_PEER, SOON_S)


async def test_a_process_does_not_even_ask_what_it_may_not(guarded: Guarded) -> None:
    actor = Talker()
    await guarded("a", "engine", actor)
    ref = (await guarded("b", "trainer", None)).ref("a")
    with pytest.raises(NotAllowed, match=r"a trainer may not call Talk\.echo"):
        await ref.call(Talk.echo, Text(""))
    with pytest.raises(NotAllowed):
        await ref.cast(Talk.tell, Text(""))
    with pytest.raises(NotAllowed):
        await anext(ref.stream(Talk.numbers, None))  # type: ignore[misc]
    assert not actor.told


async def test_a_role_is_that_of_the_connection_also_when_others_come_and_go(
    guarded: Guarded,
) -> None:
    """Connections that end leave nothing by which another could pass for them."""
    mesh = await guarded("a", "engine", Talker())
    for role, code in (("rollout", "stale_incarnation"), ("trainer", "not_allowed")) * 3:
        heard = None
        while heard is None:  # until the one before it has left, its name is taken
            with Caller(mesh.transport.address, keys_of(role), b"the same") as member:
                member.send("a", "echo", "other")
                with suppress(TimeoutError):
                    heard, _ = await member.answer(within_s=0.5)
        assert heard == code
    assert isinstance(mesh.transport, ZmqTransport)
    assert len(mesh.transport._router._roles) <= 1


@pytest.mark.parametrize(
    ("kind", "secret", "why"),
    [("engine", "", "no secret"), ("launcher", OTHER, "'launcher' is no role")],
)
async def test_a_real_process_has_a_secret_and_a_role(kind: str, secret: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        await Mesh.open("a", kind, MeshSettings("redis://nowhere.invalid", "", secret=secret))


async def test_a_mesh_without_a_table_lets_everybody_of_it_call(join: Join) -> None:
    await join("a", Talker())
    assert await (await join("b")).ref("a").call(Talk.echo, Text("x")) == Text("x")
