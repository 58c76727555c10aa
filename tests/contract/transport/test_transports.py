"""Transports under the promises of a mesh, and under floods of noise and connections."""

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
from tests.meshes import keys_of
from tests.unit.common.mesh.runtime.talking import until

SIZES = (0, 1, JOIN_BYTES, JOIN_BYTES + 1, 65_536, 1 << 20)  # of a body, around what joins frames
HALF_OPEN = 300
NOISY = 200
CHURN = 200
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
NULL = GREETING.replace(b"CURVE", b"NULL\0")
HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(192)  # a command of 200 bytes, of nobody's key


class End:
    """Transport, and all that it has reported to its mesh."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.heard: list[tuple[Peer, list[bytes], str]] = []
        self.lost: list[tuple[str, bool, bool]] = []
        self.gone: list[Peer] = []
        self.answers: Callable[[list[bytes]], Frames | None] = lambda frames: None
        transport.start(self._deliver, lambda *all: self.lost.append(all), self.gone.append)

    def _deliver(self, peer: Peer, frames: list[Frame], role: str) -> None:
        content = [bytes(frame) for frame in frames]
        self.heard.append((peer, content, role))
        answer = self.answers(content) if peer else None
        if answer is not None:
            self.transport.reply(peer, answer)


Made = Callable[..., End]


@pytest.fixture(params=["memory", "open", "curve"])
async def made(request: pytest.FixtureRequest) -> AsyncIterator[Made]:
    """`made(role)` -> an end of the same network."""
    network = MemoryNetwork(SystemClock(), Random(1))
    ends: list[End] = []

    def one(role: str = "test", **options: int) -> End:
        if request.param == "memory":
            end = End(MemoryTransport(network, f"mem://{len(ends)}", role=role))
        elif request.param == "open":
            end = End(ZmqTransport(**options))  # type: ignore[arg-type]
        else:
            end = End(ZmqTransport(keys=keys_of(role), **options))  # type: ignore[arg-type]
        ends.append(end)
        return end

    yield one
    for end in ends:
        await end.transport.close()


async def test_a_request_is_answered_and_sizes_do_not_matter(made: Made) -> None:
    server, client = made(), made()
    server.answers = lambda frames: frames
    messages = [[b"header", bytes(size)] for size in SIZES]
    messages += [[b"h" * 2048, b"body", b"", b"x" * 70_000, b"end"], [b"", b"b"]]
    for sent, frames in enumerate(messages, 1):
        client.transport.send(server.transport.address, frames)
        await until(lambda n=sent: len(client.heard) == n)  # type: ignore[misc]
    assert [frames for _, frames, _ in server.heard] == messages
    assert [frames for _, frames, _ in client.heard] == messages
    assert all(peer for peer, _, _ in server.heard)
    assert not any(peer or role for peer, _, role in client.heard)


async def test_a_sender_is_known_by_its_role_where_there_are_any(
    made: Made, request: pytest.FixtureRequest
) -> None:
    server = made("engine")
    for role in ("rollout", "trainer", "rollout"):
        made(role).transport.send(server.transport.address, (b"", role.encode()))
    await until(lambda: len(server.heard) == 3)
    for _, frames, role in server.heard:
        assert role == ("" if "open" in request.node.name else frames[1].decode())
    assert len({peer for peer, _, _ in server.heard}) == 3


@pytest.mark.parametrize("made", ["open", "curve"], indirect=True)  # memory: by virtual time alone
async def test_messages_of_one_sender_come_in_order(made: Made) -> None:
    server, client = made(high_water_mark=5), made(high_water_mark=5)
    numbers = [number.to_bytes(4, "little") for number in range(2000)]
    for number in numbers:
        client.transport.send(server.transport.address, (number, b"b" * (50 + number[0] * 60)))
    await until(lambda: len(server.heard) == len(numbers))
    assert [frames[0] for _, frames, _ in server.heard] == numbers


async def test_the_end_of_a_process_that_was_reached_is_told(made: Made) -> None:
    server, client = made(), made()
    client.transport.send(server.transport.address, (b"", b"x"))
    await until(lambda: server.heard)
    await server.transport.close()
    await until(lambda: client.lost)
    assert client.lost == [(server.transport.address, True, False)]


async def test_where_nobody_listens_nothing_arrived(made: Made) -> None:
    server, client = made(), made()
    await server.transport.close()
    client.transport.send(server.transport.address, (b"", b"x"))
    await until(lambda: client.lost)
    assert client.lost == [(server.transport.address, False, False)]


async def test_a_requester_that_has_gone_is_told_of(made: Made) -> None:
    server, client = made(), made()
    client.transport.send(server.transport.address, (b"", b"x"))
    await until(lambda: server.heard)
    peer = server.heard[0][0]
    await client.transport.close()
    async with asyncio.timeout(scaled(20)):
        while not server.gone:
            server.transport.reply(peer, (b"", b"x"))
            await asyncio.sleep(0.01)
    assert set(server.gone) == {peer}


async def test_a_connection_that_was_forgotten_is_made_anew(made: Made) -> None:
    server, client = made(), made()
    for round_ in range(3):
        client.transport.send(server.transport.address, (b"", b"x"))
        await until(lambda n=round_ + 1: len(server.heard) == n)  # type: ignore[misc]
        client.transport.disconnect(server.transport.address)
    assert not client.lost


def served(keys_role: str = "engine") -> tuple[ZmqTransport, list[bytes]]:
    """Start a process that echoes, and return it with the messages it received."""
    transport, heard = ZmqTransport(keys=keys_of(keys_role)), []

    def deliver(peer: bytes, frames: list[Frame], role: str) -> None:
        heard.append(bytes(frames[1]))
        transport.reply(peer, frames)

    transport.start(deliver, lambda *_: None, lambda *_: None)
    return transport, heard


class Friend:
    """Peer of the mesh that sends requests repeatedly."""

    def __init__(self, address: str) -> None:
        self._address, self._answers = address, 0
        self.transport = ZmqTransport(keys=keys_of("rollout"))
        self.transport.start(self._answered, lambda *_: None, lambda *_: None)

    def _answered(self, *_: object) -> None:
        self._answers += 1

    async def asks(self, anew: bool = False) -> None:
        if anew:
            self.transport.disconnect(self._address)
        before = self._answers
        self.transport.send(self._address, (b"h", b"friend"))
        await until(lambda: self._answers > before, 30.0)


def connected(transport: ZmqTransport) -> socket.socket:
    host, port = parse_endpoint(transport.address).removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=scaled(20))


async def test_noise_is_shut_out_and_friends_are_served() -> None:
    transport, heard = served()
    friend, random = Friend(transport.address), Random(7)
    await friend.asks()
    for number in range(NOISY):
        noise = random.hex_token(200).encode() if number % 2 else os.urandom(400)
        begun = (GREETING + HELLO, GREETING + noise, NULL + noise, noise, GREETING + b"\x06\xff")
        with connected(transport) as stranger:
            stranger.sendall(begun[number % len(begun)])
        if number % 20 == 0:
            await friend.asks(anew=number % 40 == 0)
    await friend.asks(anew=True)
    assert set(heard) == {b"friend"}
    await until(lambda: transport.rejected_connections["handshake"] > NOISY / 4)
    await friend.transport.close()
    await transport.close()


async def test_handshakes_that_are_left_half_done_keep_nobody_out() -> None:
    transport, heard = served()
    friend = Friend(transport.address)
    with ExitStack() as held:
        for number in range(HALF_OPEN):
            stranger = held.enter_context(connected(transport))
            stranger.sendall((GREETING, GREETING[:11], b"")[number % 3])
            if number % 100 == 0:
                await friend.asks(anew=True)
        await friend.asks(anew=True)
    assert set(heard) == {b"friend"}
    await friend.transport.close()
    await transport.close()


async def test_connections_that_come_and_go_leave_nothing() -> None:
    transport, _ = served()
    friend = Friend(transport.address)
    this = psutil.Process()

    async def churn(connections: int) -> None:
        for _ in range(connections):
            await friend.asks(anew=True)

    await churn(50)
    await asyncio.sleep(0)
    files, memory = this.num_fds(), this.memory_info().rss
    await churn(CHURN)
    await until(lambda: this.num_fds() <= files + 4)
    assert this.memory_info().rss - memory < 8 << 20
    await friend.transport.close()
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
def standing_still() -> Iterator[str]:
    """Return the address of a process whose event loop is blocked."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
        process.kill()


async def test_a_handshake_is_answered_while_the_loop_stands_still(standing_still: str) -> None:
    """Check that a blocked loop, as during a model's load, does not delay handshakes. Otherwise
    clients would give up one after another.
    """
    client = ZmqTransport(keys=keys_of("rollout"))
    client.start(lambda *_: None, lambda *_: None, lambda *_: None)
    client.send(standing_still, (b"h", b"x"))
    await until(lambda: client._connections[standing_still]._was_reached)
    await client.close()
