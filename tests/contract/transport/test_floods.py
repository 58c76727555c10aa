"""Noise, handshakes that are begun and left, and connections by the hundred: a process of the mesh
stays up, serves those who belong to it, and is in the end as large as it was.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from meshrl.common.base.encoding.messages import Frame
from meshrl.common.base.random import Random
from meshrl.common.mesh.transport.address import endpoint_of
from meshrl.common.mesh.transport.zmq import ZmqTransport
from tests.load import scaled
from tests.meshes import keys_of
from tests.unit.common.mesh.runtime.talking import until

HALF_OPEN = 300
NOISY = 200
CHURN = 200
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
NULL = GREETING.replace(b"CURVE", b"NULL\0")
HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(192)  # a command of 200 bytes, of nobody's key


def served(keys_role: str = "engine") -> tuple[ZmqTransport, list[bytes]]:
    """A process that echoes, and what it was told of."""
    transport, heard = ZmqTransport(keys=keys_of(keys_role)), []

    def deliver(peer: bytes, frames: list[Frame], role: str) -> None:
        heard.append(bytes(frames[1]))
        transport.reply(peer, frames)

    transport.start(deliver, lambda *_: None, lambda *_: None)
    return transport, heard


class Friend:
    """One of the mesh, who goes on asking."""

    def __init__(self, address: str) -> None:
        self._address, self._answers = address, 0
        self.transport = ZmqTransport(keys=keys_of("rollout"))
        self.transport.start(self._answered, lambda *_: None, lambda *_: None)

    def _answered(self, *_: object) -> None:
        self._answers += 1

    async def asks(self, anew: bool = False) -> None:
        if anew:
            self.transport.forget(self._address)
        before = self._answers
        self.transport.send(self._address, (b"h", b"friend"))
        await until(lambda: self._answers > before, 30.0)


def connected(transport: ZmqTransport) -> socket.socket:
    host, port = endpoint_of(transport.address).removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=scaled(20))


async def test_noise_is_shut_out_and_friends_are_served() -> None:
    transport, heard = served()
    friend, random = Friend(transport.address), Random(7)
    await friend.asks()
    for number in range(NOISY):
        noise = random.token(200).encode() if number % 2 else os.urandom(400)
        begun = (GREETING + HELLO, GREETING + noise, NULL + noise, noise, GREETING + b"\x06\xff")
        with connected(transport) as stranger:
            stranger.sendall(begun[number % len(begun)])
        if number % 20 == 0:
            await friend.asks(anew=number % 40 == 0)
    await friend.asks(anew=True)
    assert set(heard) == {b"friend"}
    await until(lambda: transport.refused["handshake"] > NOISY / 4)
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
from meshrl.common.mesh.transport.zmq import ZmqTransport
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
    """The address of a process whose loop does not turn."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
        process.kill()


async def test_a_handshake_is_answered_while_the_loop_stands_still(standing_still: str) -> None:
    """As it does when a model loads: or whoever connects meanwhile gives up, one after another."""
    client = ZmqTransport(keys=keys_of("rollout"))
    client.start(lambda *_: None, lambda *_: None, lambda *_: None)
    client.send(standing_still, (b"h", b"x"))
    await until(lambda: client._links[standing_still]._reached)
    await client.close()
