"""Connections that prove nothing: how many there may be, and how much they may send."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from functools import partial

import pytest
import zmq

from meshrl.common.mesh.transport.address import endpoint_of, key_of
from meshrl.common.mesh.transport.keys import KeyPair, ProcessKeys
from meshrl.common.mesh.transport.strangers import Limits, Strangers
from meshrl.common.mesh.transport.zmq import ZmqTransport
from tests.descriptors import descriptors_of
from tests.load import scaled
from tests.meshes import begun
from tests.unit.common.mesh.runtime.talking import until

SOON_S = 20.0
LIMITS = Limits(from_one=12, strangers=20, strangers_from_one=5, bytes=10_000)
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00CURVE".ljust(22, b"\0") + bytes(32)


class Door:
    """A transport that lets in whoever has a key, and what it has heard."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        keys = ProcessKeys(lambda asked: [("engine@here",) for _ in asked], lambda: 0.0)
        self.transport = ZmqTransport(keys=keys, connections=limits)
        self.heard: list[str | bytes] = []  # who sent what came
        self.transport.start(
            lambda peer, frames, role: self.heard.append(self.transport.owner(peer)),
            lambda *_: None,
            lambda *_: None,
        )
        self.place = ("127.0.0.1", int(endpoint_of(self.transport.address).rpartition(":")[2]))

    def refused(self, why: str) -> int:
        return self.transport.refused.get(why, 0)


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    found = Door()
    yield found
    await found.transport.close()


def connected(door: Door, stack: ExitStack) -> socket.socket:
    found = stack.enter_context(socket.create_connection(door.place, timeout=scaled(SOON_S)))
    found.setblocking(False)
    return found


def is_open(end: socket.socket) -> bool:
    """Whether the other end has not hung up."""
    try:
        while end.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def friend(
    door: Door, context: zmq.Context[zmq.Socket[bytes]], pair: KeyPair | None = None
) -> zmq.Socket[bytes]:
    """A member's connection, over which a message is under way."""
    made, pair = context.socket(zmq.DEALER), pair or KeyPair.new()
    made.linger = 0
    made.curve_serverkey = key_of(door.transport.address)
    made.curve_publickey, made.curve_secretkey = pair.public, pair.secret
    made.connect(endpoint_of(door.transport.address))
    made.send(begun(b"header", b"body"))
    return made


def has_heard_more(door: Door, than: int) -> bool:
    return len(door.heard) > than


async def test_of_one_address_only_so_many_may_be_unproved_at_once(door: Door) -> None:
    with ExitStack() as stack:
        ends = [connected(door, stack) for _ in range(9)]
        await until(lambda: door.refused("strangers") == 4, SOON_S)
        await until(lambda: sum(map(is_open, ends)) == 5, SOON_S)
        assert all(map(is_open, ends[:5])), "those that came first stay"
        ends[0].close()
        strangers = door.transport._door._strangers  # type: ignore[union-attr]
        assert strangers is not None
        await until(lambda: len(strangers._unproved) == 4)
        late = connected(door, stack)
        late.setblocking(True)
        assert await asyncio.to_thread(late.recv, 10), "there is room again"


async def test_who_has_proved_a_key_is_no_stranger_and_says_as_much_as_it_likes(
    door: Door,
) -> None:
    with zmq.Context() as context:
        members = []
        for number in range(8):  # one after the other, as five at once are too many
            members.append(friend(door, context))
            await until(partial(has_heard_more, door, number), SOON_S)
        for member in members:
            member.send(begun(b"header", bytes(LIMITS.bytes * 4)))
        await until(lambda: len(door.heard) == 16, SOON_S)
        await asyncio.sleep(0.6)  # two looks
        members[0].send(begun(b"header", b"body"))
        await until(lambda: len(door.heard) == 17, SOON_S)
        for member in members:
            member.close(0)
    assert not door.refused("strangers") and not door.refused("bytes")


async def test_one_address_has_only_so_many_connections(door: Door) -> None:
    with zmq.Context() as context:
        members = []  # who forgets them ends them
        for number in range(12):
            members.append(friend(door, context))
            await until(partial(has_heard_more, door, number), SOON_S)
        members.append(friend(door, context))
        await until(lambda: door.refused("connections"), SOON_S)
        assert len(door.heard) == 12
        context.destroy(0)


async def test_a_stranger_that_goes_on_sending_is_hung_up_on(door: Door) -> None:
    """It announces one long command, which ZeroMQ would take in whole."""
    with socket.create_connection(door.place, timeout=scaled(SOON_S)) as stranger:
        stranger.sendall(GREETING + b"\x06" + (100 << 20).to_bytes(8, "big"))

        def send_until_it_is_refused() -> None:
            ends = time.monotonic() + scaled(SOON_S)
            with suppress(OSError):
                while time.monotonic() < ends:
                    stranger.send(bytes(4096))
                    time.sleep(0.001)  # what is looked at now and then is not to be over before

        await asyncio.to_thread(send_until_it_is_refused)
        await until(lambda: door.refused("bytes") == 1, SOON_S)


def test_a_number_that_is_a_file_s_by_now_costs_no_descriptor() -> None:
    strangers = Strangers(LIMITS, Counter())
    reading, writing = os.pipe()
    try:
        before = descriptors_of(reading)
        strangers.came(reading)
        assert descriptors_of(reading) == before >= {reading, writing}
    finally:
        os.close(reading)
        os.close(writing)


async def test_connections_that_come_and_go_are_not_counted_for_ever(door: Door) -> None:
    for _ in range(30):
        with socket.create_connection(door.place, timeout=scaled(SOON_S)) as stranger:
            assert await asyncio.to_thread(stranger.recv, 10)
    strangers = door.transport._door._strangers  # type: ignore[union-attr]
    assert strangers is not None
    await until(lambda: not strangers._all and not strangers._from, SOON_S)
    assert not strangers._unproved and not strangers._strangers_from
    assert not door.refused("strangers")


async def test_connections_with_one_key_are_of_one_requester(door: Door) -> None:
    pair = KeyPair.new()
    with zmq.Context() as context:
        members = [friend(door, context, pair), friend(door, context, pair), friend(door, context)]
        await until(lambda: len(door.heard) == 3, SOON_S)
        assert sorted(map(door.heard.count, set(door.heard))) == [1, 2]
        for member in members:
            member.close(0)
