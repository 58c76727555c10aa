"""Processes that are killed, and peers that do not read."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq

from loadtests.rpc.echo import PING, Echo
from meshrl.common.base.encoding.messages import Frame
from meshrl.common.base.errors import PeerLost
from meshrl.common.mesh.transport.zmq import ZmqTransport
from meshrl.common.state import registry
from tests.load import scaled
from tests.meshes import begun, keys_of
from tests.unit.common.mesh.runtime.talking import Join, call_until_refused, until

KEYS = keys_of("loadtest")  # that the echo lets in


@pytest.fixture
def echo() -> Iterator[tuple[subprocess.Popen[str], registry.Entry]]:
    """A real process that answers Echo, and its registry entry."""
    argv = [sys.executable, "-m", "loadtests.rpc.echo", KEYS.public]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address, incarnation = process.stdout.readline().split()
    yield process, registry.Entry("echo", "test", address=address, incarnation=incarnation)
    process.kill()
    process.wait()
    process.stdout.close()


async def test_calls_to_a_killed_process_fail_at_once(
    join: Join, echo: tuple[subprocess.Popen[str], registry.Entry]
) -> None:
    process, entry = echo
    mesh = await join("b", kind="loadtest", transport=ZmqTransport(keys=KEYS))
    await registry.register(mesh.state, entry, 60_000)
    ref = mesh.ref("echo")
    assert await ref.call(Echo.inline, PING) == PING
    os.kill(process.pid, signal.SIGSTOP)
    calls = [asyncio.create_task(ref.call(Echo.inline, PING, deadline_s=9e3)) for _ in range(200)]
    await asyncio.sleep(0.1)
    process.kill()
    async with asyncio.timeout(scaled(30)):  # not at their own deadline
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(o, PeerLost) and "echo has gone" in str(o) for o in outcomes)


async def test_a_call_to_a_process_that_has_ended_is_a_lost_peer(
    join: Join, echo: tuple[subprocess.Popen[str], registry.Entry]
) -> None:
    process, entry = echo
    process.kill()
    process.wait()
    mesh = await join("b", kind="loadtest", transport=ZmqTransport(keys=KEYS))
    await registry.register(mesh.state, entry, 60_000)
    with pytest.raises(PeerLost, match="echo has gone"):
        await call_until_refused(mesh.ref("echo"), Echo.inline, PING)
    assert mesh.telemetry.counters["repeated_peer_lost"] >= 1  # nothing had arrived


async def test_replies_beyond_the_high_water_mark_are_all_delivered() -> None:
    """The requester does not read for a while; what the ROUTER refuses is parked, in order."""
    server = ZmqTransport(hwm=2)
    replies, size = 400, 60_000  # 24 MB: more than the kernel holds

    def answer(peer: bytes, frames: list[Frame], role: str) -> None:
        for place in range(replies):
            server.reply(peer, (place.to_bytes(4, "little"), bytes(size)))

    server.start(answer, lambda *_: None, lambda *_: None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.set(zmq.RCVHWM, 2)
        client.connect(server.address)
        client.send(begun(b"", b"all"))
        await until(lambda: server.parked > 100)
        await asyncio.sleep(0.1)
        assert server.parked > 100
        got: list[int] = []
        while len(got) < replies:
            await until(lambda: client.poll(0))
            got.append(int.from_bytes(client.recv_multipart()[0][2:], "little"))
        assert got == list(range(replies))
        client.close(0)
    assert server.parked == 0
    await server.close()


async def test_a_requester_that_has_gone_is_reported() -> None:
    server, client = ZmqTransport(), ZmqTransport()
    asked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    gone: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    server.start(lambda peer, *_: asked.set_result(peer), lambda *_: None, gone.set_result)
    client.start(lambda *_: None, lambda *_: None, lambda *_: None)
    client.send(server.address, (b"", b""))
    async with asyncio.timeout(scaled(10)):
        peer = await asked
        await client.close()
        while not gone.done():
            server.reply(peer, (b"", b""))
            await asyncio.sleep(0.01)
    assert gone.result() == peer
    await server.close()


async def test_a_peer_that_was_silent_has_not_refused_however_late_one_hears_of_that() -> None:
    """All of the handshake goes by while the loop stands still."""
    client = ZmqTransport(keys=keys_of("engine"), handshake_s=0.3)
    lost: list[tuple[str, bool, bool]] = []
    client.start(lambda *_: None, lambda *all: lost.append(all), lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as still:
        still.settimeout(scaled(20.0))
        address = f"tcp://127.0.0.1:{still.getsockname()[1]}#{KEYS.public}"
        client.send(address, (b"", b""))
        accepted, _ = still.accept()
        with accepted:
            accepted.settimeout(scaled(20.0))
            while accepted.recv(4096):  # until it is given up
                pass
        await until(lambda: lost, 20.0)
    assert lost == [(address, False, False)]
    await client.close()
