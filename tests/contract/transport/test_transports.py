"""Transports under their contract, and under floods of noise and connections."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.encoding.messages import Frame
from meshrl.common.base.random import Random
from meshrl.common.mesh.transport.address import parse_endpoint
from meshrl.common.mesh.transport.base import Frames, Peer, Transport
from meshrl.common.mesh.transport.socket_pump import JOIN_BYTES
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests.load import scaled
from tests.meshes import make_keys
from tests.unit.common.mesh.runtime.talking import until

# Of a body, around the limit up to which frames are joined.
SIZES = (0, 1, JOIN_BYTES, JOIN_BYTES + 1, 65_536, 1 << 20)
HALF_OPEN = 300
NOISY = 200
CHURN = 200
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
NULL = GREETING.replace(b"CURVE", b"NULL\0")
# A command of 200 bytes, with a key that no process owns.
HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(192)


class Endpoint:
    """Transport with all messages and events that it has delivered."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.received: list[tuple[Peer, list[bytes], str]] = []
        self.lost_peers: list[tuple[str, bool, bool]] = []
        self.gone_peers: list[Peer] = []
        self.responder: Callable[[list[bytes]], Frames | None] = lambda frames: None
        transport.start(
            self._deliver, lambda *all: self.lost_peers.append(all), self.gone_peers.append
        )

    def _deliver(self, peer: Peer, frames: list[Frame], role: str) -> None:
        content = [bytes(frame) for frame in frames]
        self.received.append((peer, content, role))
        answer = self.responder(content) if peer else None
        if answer is not None:
            self.transport.reply(peer, answer)


EndpointFactory = Callable[..., Endpoint]


@pytest.fixture(params=["memory", "open", "curve"])
async def open_endpoint(request: pytest.FixtureRequest) -> AsyncIterator[EndpointFactory]:
    """`open_endpoint(role)` -> an endpoint of the same network."""
    network = MemoryNetwork(SystemClock(), Random(1))
    endpoints: list[Endpoint] = []

    def open_one(role: str = "test", **options: int) -> Endpoint:
        if request.param == "memory":
            endpoint = Endpoint(MemoryTransport(network, f"mem://{len(endpoints)}", role=role))
        elif request.param == "open":
            endpoint = Endpoint(ZmqTransport(**options))  # type: ignore[arg-type]
        else:
            endpoint = Endpoint(ZmqTransport(keys=make_keys(role), **options))  # type: ignore[arg-type]
        endpoints.append(endpoint)
        return endpoint

    yield open_one
    for endpoint in endpoints:
        await endpoint.transport.close()


async def test_request_of_any_size_is_answered(open_endpoint: EndpointFactory) -> None:
    server, client = open_endpoint(), open_endpoint()
    server.responder = lambda frames: frames
    messages = [[b"header", bytes(size)] for size in SIZES]
    messages += [[b"h" * 2048, b"body", b"", b"x" * 70_000, b"end"], [b"", b"b"]]
    for sent, frames in enumerate(messages, 1):
        client.transport.send(server.transport.address, frames)
        await until(lambda n=sent: len(client.received) == n)  # type: ignore[misc]
    assert [frames for _, frames, _ in server.received] == messages
    assert [frames for _, frames, _ in client.received] == messages
    assert all(peer for peer, _, _ in server.received)
    assert not any(peer or role for peer, _, role in client.received)


async def test_sender_is_identified_by_its_role_if_the_transport_has_keys(
    open_endpoint: EndpointFactory, request: pytest.FixtureRequest
) -> None:
    server = open_endpoint("engine")
    for role in ("rollout", "trainer", "rollout"):
        open_endpoint(role).transport.send(server.transport.address, (b"", role.encode()))
    await until(lambda: len(server.received) == 3)
    for _, frames, role in server.received:
        assert role == ("" if "open" in request.node.name else frames[1].decode())
    assert len({peer for peer, _, _ in server.received}) == 3


@pytest.mark.parametrize(
    "open_endpoint", ["open", "curve"], indirect=True
)  # memory delivers by virtual time only
async def test_messages_of_one_sender_arrive_in_order(open_endpoint: EndpointFactory) -> None:
    server, client = open_endpoint(high_water_mark=5), open_endpoint(high_water_mark=5)
    numbers = [number.to_bytes(4, "little") for number in range(2000)]
    for number in numbers:
        client.transport.send(server.transport.address, (number, b"b" * (50 + number[0] * 60)))
    await until(lambda: len(server.received) == len(numbers))
    assert [frames[0] for _, frames, _ in server.received] == numbers


async def test_exit_of_a_reached_peer_is_reported(open_endpoint: EndpointFactory) -> None:
    server, client = open_endpoint(), open_endpoint()
    client.transport.send(server.transport.address, (b"", b"x"))
    await until(lambda: server.received)
    await server.transport.close()
    await until(lambda: client.lost_peers)
    assert client.lost_peers == [(server.transport.address, True, False)]


async def test_message_to_a_closed_address_is_reported_as_not_delivered(
    open_endpoint: EndpointFactory,
) -> None:
    server, client = open_endpoint(), open_endpoint()
    await server.transport.close()
    client.transport.send(server.transport.address, (b"", b"x"))
    await until(lambda: client.lost_peers)
    assert client.lost_peers == [(server.transport.address, False, False)]


async def test_departed_requester_is_reported(open_endpoint: EndpointFactory) -> None:
    server, client = open_endpoint(), open_endpoint()
    client.transport.send(server.transport.address, (b"", b"x"))
    await until(lambda: server.received)
    peer = server.received[0][0]
    await client.transport.close()
    async with asyncio.timeout(scaled(20)):
        while not server.gone_peers:
            server.transport.reply(peer, (b"", b"x"))
            await asyncio.sleep(0.01)
    assert set(server.gone_peers) == {peer}


async def test_disconnected_peer_is_connected_again(open_endpoint: EndpointFactory) -> None:
    server, client = open_endpoint(), open_endpoint()
    for round_ in range(3):
        client.transport.send(server.transport.address, (b"", b"x"))
        await until(lambda n=round_ + 1: len(server.received) == n)  # type: ignore[misc]
        client.transport.disconnect(server.transport.address)
    assert not client.lost_peers


def start_echo_server(keys_role: str = "engine") -> tuple[ZmqTransport, list[bytes]]:
    """Start a transport that echoes, and return it with the messages it received."""
    transport, received = ZmqTransport(keys=make_keys(keys_role)), []

    def deliver(peer: bytes, frames: list[Frame], role: str) -> None:
        received.append(bytes(frames[1]))
        transport.reply(peer, frames)

    transport.start(deliver, lambda *_: None, lambda *_: None)
    return transport, received


class Client:
    """Peer of the mesh that sends requests repeatedly."""

    def __init__(self, address: str) -> None:
        self._address, self._answers = address, 0
        self.transport = ZmqTransport(keys=make_keys("rollout"))
        self.transport.start(self._count_answer, lambda *_: None, lambda *_: None)

    def _count_answer(self, *_: object) -> None:
        self._answers += 1

    async def request(self, reconnect: bool = False) -> None:
        if reconnect:
            self.transport.disconnect(self._address)
        before = self._answers
        self.transport.send(self._address, (b"h", b"friend"))
        await until(lambda: self._answers > before, 30.0)


def connect(transport: ZmqTransport) -> socket.socket:
    host, port = parse_endpoint(transport.address).removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=scaled(20))


async def test_noise_is_rejected_while_clients_are_served() -> None:
    transport, received = start_echo_server()
    client, random = Client(transport.address), Random(7)
    await client.request()
    for number in range(NOISY):
        noise = random.hex_token(200).encode() if number % 2 else os.urandom(400)
        openings = (GREETING + HELLO, GREETING + noise, NULL + noise, noise, GREETING + b"\x06\xff")
        with connect(transport) as connection:
            connection.sendall(openings[number % len(openings)])
        if number % 20 == 0:
            await client.request(reconnect=number % 40 == 0)
    await client.request(reconnect=True)
    assert set(received) == {b"friend"}
    await until(lambda: transport.rejected_connections["handshake"] > NOISY / 4)
    await client.transport.close()
    await transport.close()


async def test_half_open_handshakes_do_not_block_clients() -> None:
    transport, received = start_echo_server()
    client = Client(transport.address)
    with ExitStack() as connections:
        for number in range(HALF_OPEN):
            connection = connections.enter_context(connect(transport))
            connection.sendall((GREETING, GREETING[:11], b"")[number % 3])
            if number % 100 == 0:
                await client.request(reconnect=True)
        await client.request(reconnect=True)
    assert set(received) == {b"friend"}
    await client.transport.close()
    await transport.close()


async def test_connection_churn_leaks_no_files_or_memory() -> None:
    transport, _ = start_echo_server()
    client = Client(transport.address)
    process = psutil.Process()

    async def churn(connections: int) -> None:
        for _ in range(connections):
            await client.request(reconnect=True)

    await churn(50)
    await asyncio.sleep(0)
    files, memory = process.num_fds(), process.memory_info().rss
    await churn(CHURN)
    await until(lambda: process.num_fds() <= files + 4)
    assert process.memory_info().rss - memory < 8 << 20
    await client.transport.close()
    await transport.close()


PROGRAM = """
import asyncio, time
from meshrl.common.mesh.transport.keys import ProcessKeys
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
async def main():
    anybody = lambda keys: [("rollout@here",) for _ in keys]
    transport = ZmqTransport(keys=ProcessKeys(anybody, time.monotonic))
    transport.start(lambda *_: None, lambda *_: None, lambda *_: None)
    print(transport.address, flush=True)
    time.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
def blocked_process() -> Iterator[str]:
    """Return the address of a process whose event loop is blocked."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
        process.kill()


async def test_handshake_is_answered_while_the_event_loop_is_blocked(blocked_process: str) -> None:
    """Check that a blocked loop, as during a model load, does not delay handshakes. Otherwise
    clients would give up one after another.
    """
    client = ZmqTransport(keys=make_keys("rollout"))
    client.start(lambda *_: None, lambda *_: None, lambda *_: None)
    client.send(blocked_process, (b"h", b"x"))
    await until(lambda: client._connections[blocked_process]._was_reached)
    await client.close()
