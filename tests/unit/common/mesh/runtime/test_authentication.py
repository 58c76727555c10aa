"""Authentication by mesh keys and authorization of calls by role."""

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
from tests.meshes import PATIENT, encode_first_frame, make_curve_socket, make_keys
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

Guarded = Callable[..., Coroutine[Any, Any, Mesh]]


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    """Return `guarded`: `await guarded(name, role, actor)` opens a mesh where rollouts may call
    `Talk.echo` and `Talk.sleep`.
    """
    clock = SystemClock()
    state, callers = (
        open_simulated_state(clock),
        {method.label: frozenset({"rollout"}) for method in (Talk.echo, Talk.sleep)},
    )
    meshes: list[Mesh] = []

    async def join_mesh(
        name: str, role: str, actor: Talker | None = None, announce: bool = False
    ) -> Mesh:
        mesh = Mesh(
            name,
            role,
            MeshDependencies(
                state=state,
                transport=ZmqTransport(keys=make_keys(role)),
                clock=clock,
                random=Random.from_os_entropy(),
                host=SystemHost(),
            ),
            terms=LeaseTerms(**PATIENT),
            access=AccessRules(callers=callers),
        )
        meshes.append(mesh)
        if announce:
            await mesh.announce(Talk, lambda: {"starting": "loading"})
        else:
            await mesh.join(actor)
        return mesh

    yield join_mesh
    for mesh in meshes:
        await mesh.leave()
    await state.close()


class Caller:
    """Raw socket with the given keys that can send any message."""

    def __init__(self, address: str, keys: ProcessKeys | None, identity: bytes = b"") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        if identity:
            self._socket.set(zmq.ROUTING_ID, identity)
        if keys is not None:
            make_curve_socket(self._socket, keys, address)
        self._socket.connect(parse_endpoint(address))

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def send(self, actor: str, method: str, target: str, call_id: int = 1) -> None:
        header = pack_header(CALL, call_id, actor, method, "someone", target, 60_000)
        self._socket.send(encode_first_frame(header, HELLO))

    def send_raw(self, frame: bytes) -> None:
        self._socket.send(frame)

    @property
    def has_answer(self) -> bool:
        return bool(self._socket.poll(0))

    async def answer(self, within_s: float = SOON_S) -> tuple[str, str]:
        """Return code and text of the error that arrives."""
        await until(lambda: self.has_answer, within_s)
        answer = self._socket.recv()
        return unpack_error(answer[2 + int.from_bytes(answer[:2], "little") :])


class WrongServer(ProcessKeys):
    """Keys that expect a wrong public key of every server."""

    def find_expected_key(self, address: str) -> bytes:
        return KeyPair.generate().public


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (None, "handshake"),
        (make_keys("rollout", OTHER), "keys"),
        (WrongServer(lambda asked: [], time.monotonic), "handshake"),
    ],
    ids=["no keys", "another mesh's keys", "another server's key"],
)
async def test_unauthenticated_peer_gets_no_answer(
    guarded: Guarded, keys: ProcessKeys | None, why: str
) -> None:
    mesh = await guarded("a", "engine", Talker())
    client = (await guarded("b", "rollout", None)).ref("a")
    with Caller(mesh.transport.address, keys) as connection:
        connection.send("a", "echo", mesh.incarnation)
        await until(lambda: mesh.transport.rejected_connections.get(why), SOON_S)
        assert await client.call(Talk.echo, Text("friend")) == Text("friend")
        assert not connection.has_answer
    await until(lambda: f"refused_{why}" in mesh.telemetry.counters, SOON_S)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (None, "contains no key.*`meshrl down`"),
        (make_keys("engine", OTHER), "wrong keys.*`meshrl keys`"),
    ],
    ids=["open", "another mesh's"],
)
async def test_call_to_a_process_with_other_keys_raises_handshake_failed(
    guarded: Guarded, keys: ProcessKeys | None, why: str
) -> None:
    mesh = await guarded("b", "rollout", None)
    caller = mesh.ref("a")
    other = ZmqTransport(keys=keys)
    received: list[object] = []
    other.start(lambda *all: received.append(all), lambda *_: None, lambda *_: None)
    entry = registry.RegistryEntry("a", "engine", address=other.address, incarnation="x" * 16)
    await registry.register(mesh.state, entry, 60_000)
    with pytest.raises(HandshakeFailed, match=why):
        await call_until_refused(caller, Talk.echo, Text("secret"))
    assert not received
    await other.close()


async def test_persistently_wrong_keys_are_not_retryable(guarded: Guarded) -> None:
    mesh = await guarded("b", "rollout", None)
    caller = mesh.ref("a")
    other = ZmqTransport(keys=make_keys("engine", OTHER))
    other.start(lambda *_: None, lambda *_: None, lambda *_: None)
    entry = registry.RegistryEntry("a", "engine", address=other.address, incarnation="x" * 16)
    await registry.register(mesh.state, entry, 60_000)
    with pytest.raises(HandshakeFailed) as first:
        await call_until_refused(caller, Talk.echo, Text(""))
    assert first.value.retryable
    mesh._caller._rejected_since[entry.incarnation] -= WRONG_KEYS_AFTER_S
    with pytest.raises(HandshakeFailed) as later:
        await caller.call(Talk.echo, Text(""), deadline_s=3600.0)  # which it does not wait for
    assert not later.value.retryable
    await other.close()


async def test_silent_server_is_not_reported_as_wrong_keys(guarded: Guarded) -> None:
    """Check that a silent server, which may still recover, is not reported as having wrong keys."""
    mesh = await guarded("b", "rollout", None)
    assert isinstance(mesh.transport, ZmqTransport)
    mesh.transport._handshake_timeout_s = 0.5
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        endpoint = make_keys("engine").make_address(
            f"tcp://127.0.0.1:{silent_server.getsockname()[1]}"
        )
        entry = registry.RegistryEntry("a", "engine", address=endpoint, incarnation="x" * 16)
        await registry.register(mesh.state, entry, 60_000)
        mesh._caller._rejected_since[entry.incarnation] = -WRONG_KEYS_AFTER_S
        with pytest.raises(MeshError) as raised:
            await mesh.ref("a").call(Talk.echo, Text(""), deadline_s=3.0)
        assert raised.value.retryable and not isinstance(raised.value, HandshakeFailed)


async def test_impostor_on_a_port_receives_no_message_content(guarded: Guarded) -> None:
    """Check that a process without the key receives only a greeting, which contains no
    information.
    """
    mesh = await guarded("b", "rollout", None)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.settimeout(scaled(SOON_S))
        endpoint = f"tcp://127.0.0.1:{impostor.getsockname()[1]}"
        address = make_keys("engine").make_address(endpoint)
        entry = registry.RegistryEntry(
            "a", "engine", address=address, incarnation="the one and only"
        )
        await registry.register(mesh.state, entry, 60_000)
        call = asyncio.create_task(mesh.ref("a").call(Talk.echo, Text("precious")))
        accepted, _ = await asyncio.to_thread(impostor.accept)
        accepted.settimeout(scaled(SOON_S))
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00CURVE".ljust(22, b"\0") + bytes(32)
        accepted.sendall(greeting)  # as a mesh process starts
        received = b""
        while len(received) < 64 + 202:  # a greeting, and HELLO with its two octets before
            received += await asyncio.to_thread(accepted.recv, 4096)
        for word in (b"precious", b"the one and only", b"echo", b"rollout"):
            assert word not in received
        call.cancel()
        accepted.close()


@pytest.mark.parametrize(
    ("actor", "method", "right"),
    [("a", "echo", True), ("a", "echo", False), ("z", "echo", True), ("a", "no such", True)],
)
async def test_disallowed_caller_gets_the_same_error_for_any_request(
    guarded: Guarded, actor: str, method: str, right: bool
) -> None:
    talker = Talker()
    mesh = await guarded("a", "engine", talker)
    with Caller(mesh.transport.address, make_keys("trainer")) as caller:
        caller.send(actor, method, mesh.incarnation if right else "other")
        assert await caller.answer() == ("not_allowed", "not allowed")
    assert mesh.telemetry.counters["refused_not_allowed"] == 1


async def test_stale_incarnation_error_does_not_contain_the_current_one(guarded: Guarded) -> None:
    mesh = await guarded("a", "engine", Talker())
    with Caller(mesh.transport.address, make_keys("rollout")) as caller:
        caller.send("a", "echo", "an earlier start")
        code, text = await caller.answer()
    assert code == "stale_incarnation" and mesh.incarnation not in text


async def test_disallowed_request_is_rejected_before_the_actor_starts(
    guarded: Guarded,
) -> None:
    starting = Talker(start_s=3600.0)
    joining = asyncio.create_task(guarded("a", "engine", starting))
    trainer = await guarded("b", "trainer", None)
    entry = None
    while entry is None or not entry.alive:
        entry = await registry.lookup(trainer.state, "a")
        await asyncio.sleep(0.01)
    with Caller(entry.address, make_keys("trainer")) as caller:
        caller.send("a", "echo", entry.incarnation)
        assert (await caller.answer())[0] == "not_allowed"
    await cancel(joining)


async def test_announced_process_publishes_its_progress_and_answers_once_it_joins(
    guarded: Guarded,
) -> None:
    client = await guarded("b", "rollout", None)
    starting = await guarded("a", "engine", Talker(), announce=True)
    entry = await registry.lookup(client.state, "a")
    assert entry is not None and entry.alive and entry.stats["starting"] == "loading"
    reply = asyncio.create_task(client.ref("a").call(Talk.echo, Text("early")))
    await until(lambda: starting._server._early_requests)
    with Caller(entry.address, make_keys("trainer")) as caller:
        caller.send("a", "echo", entry.incarnation)
        assert (await caller.answer())[0] == "not_allowed"
    await starting.join(Talker(), bulk_address="tcp://bulk")
    assert await reply == Text("early")
    entry = await registry.lookup(client.state, "a")
    assert entry is not None and entry.token == starting.token
    assert entry.bulk == "tcp://bulk" and "starting" not in entry.stats


async def test_flooding_requester_does_not_block_others(guarded: Guarded) -> None:
    """Check that a requester with many unanswered calls is limited to its own quota."""
    mesh = await guarded("a", "engine", Talker())
    client = (await guarded("b", "rollout", None)).ref("a")
    body = encode(Number(600))[0]
    with Caller(mesh.transport.address, make_keys("rollout")) as greedy:

        def flood() -> None:
            for call_id in range(1, MAX_RUNNING_PER_PEER + 2):
                header = pack_header(CALL, call_id, "a", "sleep", "one", mesh.incarnation, 600_000)
                greedy.send_raw(encode_first_frame(header, body))

        await asyncio.to_thread(flood)
        assert await greedy.answer() == (
            "overloaded",
            f"a has {MAX_RUNNING_PER_PEER} calls of this process in progress",
        )
        assert mesh.running_calls == MAX_RUNNING_PER_PEER
        assert await client.call(Talk.echo, Text("friend")) == Text("friend")
        mesh._server._running[next(iter(mesh._server._running))].cancel(None)
        await until(lambda: mesh.running_calls < MAX_RUNNING_PER_PEER, SOON_S)
        greedy.send_raw(
            encode_first_frame(
                pack_header(CALL, 9999, "a", "sleep", "two", mesh.incarnation, 600_000), body
            )
        )
        await until(lambda: mesh.running_calls == MAX_RUNNING_PER_PEER, SOON_S)


async def test_disallowed_calls_are_rejected_by_the_caller_itself(guarded: Guarded) -> None:
    actor = Talker()
    await guarded("a", "engine", actor)
    ref = (await guarded("b", "trainer", None)).ref("a")
    with pytest.raises(NotAllowed, match=r"a trainer may not call Talk\.echo"):
        await ref.call(Talk.echo, Text(""))
    with pytest.raises(NotAllowed):
        await ref.cast(Talk.tell, Text(""))
    with pytest.raises(NotAllowed):
        await anext(ref.stream(Talk.numbers, None))  # type: ignore[misc]
    assert not actor.received_texts


async def test_role_belongs_to_the_connection_when_identities_are_reused(
    guarded: Guarded,
) -> None:
    """Check that closed connections leave no role to be reused by another peer."""
    mesh = await guarded("a", "engine", Talker())
    for role, code in (("rollout", "stale_incarnation"), ("trainer", "not_allowed")) * 3:
        code_received = None
        while code_received is None:  # the previous connection must close before its name is free
            with Caller(mesh.transport.address, make_keys(role), b"the same") as caller:
                caller.send("a", "echo", "other")
                with suppress(TimeoutError):
                    code_received, _ = await caller.answer(within_s=0.5)
        assert code_received == code
    assert isinstance(mesh.transport, ZmqTransport)
    assert len(mesh.transport._router._roles) <= 1


@pytest.mark.parametrize(
    ("kind", "secret", "why"),
    [("engine", "", "no secret"), ("launcher", OTHER, "'launcher' is not a process role")],
)
async def test_mesh_open_requires_a_secret_and_a_known_role(
    kind: str, secret: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        await Mesh.open("a", kind, MeshSettings("redis://nowhere.invalid", "", secret=secret))


async def test_mesh_without_access_rules_allows_all_callers(join: Join) -> None:
    await join("a", Talker())
    assert await (await join("b")).ref("a").call(Talk.echo, Text("x")) == Text("x")
