"""What a mesh relies on of its transport: open sockets, authenticated ones, the simulated network.

The virtual mesh says something of real ones only as far as this holds of all three.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.encoding.messages import Frame
from meshrl.common.base.random import Random
from meshrl.common.mesh.transport.base import Frames, Peer, Transport
from meshrl.common.mesh.transport.pump import JOIN_BYTES
from meshrl.common.mesh.transport.zmq import ZmqTransport
from meshrl.sim.network import MemoryNetwork, MemoryTransport
from tests.load import scaled
from tests.meshes import keys_of
from tests.unit.common.mesh.runtime.talking import until

SIZES = (0, 1, JOIN_BYTES, JOIN_BYTES + 1, 65_536, 1 << 20)  # of a body, around what joins frames


class End:
    """A transport, and all that it has told its mesh."""

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
    server, client = made(hwm=5), made(hwm=5)
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
        client.transport.forget(server.transport.address)
    assert not client.lost
