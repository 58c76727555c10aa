"""Keys of processes, and limits of connections that prove none."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import pytest
import zmq

from meshrl.common.base.errors import StateUnavailable, WrongKeys
from meshrl.common.mesh.transport.address import (
    format_address,
    format_key,
    parse_endpoint,
    parse_key,
)
from meshrl.common.mesh.transport.keys import MAX_KNOWN_KEYS, REDIS_BACKOFF_S, KeyPair, ProcessKeys
from meshrl.common.mesh.transport.unauthenticated_peers import (
    ConnectionLimits,
    UnauthenticatedPeers,
)
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from tests.descriptors import descriptors_of
from tests.load import scaled
from tests.meshes import begun
from tests.unit.common.mesh.runtime.talking import until

HOST = "gpu1-1f3a9c"
SOON_S = 20.0
LIMITS = ConnectionLimits(
    per_address=12, unauthenticated=20, unauthenticated_per_address=5, unauthenticated_bytes=10_000
)
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00CURVE".ljust(22, b"\0") + bytes(32)


@dataclass
class Doors:
    """Whose keys are whose, as Redis would tell."""

    holders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    silent: bool = False
    asked: int = 0
    now: float = 0.0

    def whose(self, keys: Sequence[str]) -> list[tuple[str, ...]]:
        self.asked += 1
        if self.silent:
            raise StateUnavailable("Redis does not answer")
        return [self.holders.get(key, ()) for key in keys]

    def keys(self) -> ProcessKeys:
        return ProcessKeys(self.whose, lambda: self.now)

    def enter(self, role: str) -> bytes:
        """A new key."""
        public = KeyPair.generate().public
        self.holders[format_key(public)] = (f"{role}@{HOST}",)
        return public


def test_a_process_answers_and_asks_with_one_pair_that_nobody_else_has() -> None:
    doors = Doors()
    mine, other = doors.keys(), doors.keys()
    assert mine.own_pair != other.own_pair
    assert mine.own_pair.secret.decode() not in repr(mine.own_pair)
    address = other.make_address("tcp://[::1]:5")
    assert parse_endpoint(address) == "tcp://[::1]:5"
    assert mine.find_expected_key(address) == other.own_pair.public
    pair = KeyPair.generate()
    assert format_address("tcp://h:1", pair.public) == f"tcp://h:1#{format_key(pair.public)}"


@pytest.mark.parametrize("address", ["tcp://a:1", "tcp://a:1#", "tcp://a:1#zz", "tcp://a:1#abcd"])
def test_an_address_without_a_key_is_refused(address: str) -> None:
    with pytest.raises(WrongKeys, match=r"names no key.*`meshrl down`"):
        Doors().keys().find_expected_key(address)


def test_a_key_is_looked_up_once_and_a_stranger_each_time() -> None:
    doors = Doors()
    keys, engine, stranger = doors.keys(), doors.enter("engine"), KeyPair.generate().public
    assert [keys.find_roles(engine) for _ in range(3)] == ["engine"] * 3
    assert doors.asked == 1
    assert keys.find_roles(stranger) is None
    doors.holders[format_key(stranger)] = (f"worker@{HOST}",)  # it came a moment too early
    assert keys.find_roles(stranger) == "worker"
    assert keys.find_current_roles(keys.make_user_id(engine, "engine")) == "engine"


def test_while_redis_is_silent_the_known_come_in_and_others_are_to_try_again() -> None:
    doors = Doors()
    keys, known, unknown = doors.keys(), doors.enter("engine"), doors.enter("worker")
    keys.find_roles(known)
    doors.silent = True
    assert keys.find_roles(known) == "engine"
    for _ in range(5):
        with pytest.raises(StateUnavailable):
            keys.find_roles(unknown)
    assert doors.asked == 2, "nobody waits for each of them"
    doors.silent, doors.now = False, REDIS_BACKOFF_S
    assert keys.find_roles(unknown) == "worker"


def test_a_key_that_was_revoked_is_forgotten_when_the_number_rises() -> None:
    doors, heard = Doors(), []
    keys, one, two = doors.keys(), doors.enter("engine"), doors.enter("worker")
    keys.add_change_listener(lambda: heard.append("changed"))
    keys.refresh_keys(0)
    users = [keys.make_user_id(key, keys.find_roles(key) or "") for key in (one, two)]
    before = doors.asked
    keys.refresh_keys(0)
    assert doors.asked == before, "nothing has changed"
    del doors.holders[format_key(one)]
    doors.silent, heard[:] = True, []
    keys.refresh_keys(1)
    assert keys.find_current_roles(users[0]) == "engine" and not heard
    doors.silent = False
    keys.refresh_keys(1)
    assert [keys.find_current_roles(user) for user in users] == ["", "worker"] and heard
    keys.refresh_keys(0)  # an older Redis: what it knows is another thing again
    assert doors.asked == before + 3


def test_in_doubt_a_key_is_asked_for_again_and_nothing_is_forgotten_before_the_answer() -> None:
    doors, heard = Doors(), []
    keys, engine = doors.keys(), doors.enter("engine")
    keys.add_change_listener(lambda: heard.append("changed"))
    key = keys.make_user_id(engine, keys.find_roles(engine) or "")
    doors.silent = True
    with pytest.raises(StateUnavailable):
        keys.refresh_key(key)
    assert keys.find_current_roles(key) == "engine" and not heard
    doors.silent = False
    assert keys.refresh_key(key) == (f"engine@{HOST}",)
    del doors.holders[key]
    assert keys.refresh_key(key) == ()
    assert keys.find_current_roles(key) == "" and len(heard) == 2


def test_keys_of_processes_that_have_gone_do_not_fill_the_memory() -> None:
    doors = Doors()
    keys = doors.keys()
    keys.refresh_keys(0)
    for _ in range(MAX_KNOWN_KEYS + 1):
        keys.find_roles(doors.enter("rank"))
    doors.holders.clear()
    last = doors.enter("engine")
    keys.find_roles(last)
    keys.refresh_keys(0)
    assert len(keys._known) == 1 and keys.find_current_roles(format_key(last)) == "engine"


def test_who_enters_the_key_of_another_takes_nothing_from_it() -> None:
    doors = Doors()
    keys, trainer = doors.keys(), doors.enter("trainer")
    doors.holders[format_key(trainer)] += ("engine@gpu2-77aa01", "trainer@gpu2-77aa01")
    assert (
        keys.find_roles(trainer) == keys.find_current_roles(format_key(trainer)) == "engine trainer"
    )


class Door:
    """A transport that lets in whoever has a key, and what it has heard."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        keys = ProcessKeys(lambda asked: [("engine@here",) for _ in asked], lambda: 0.0)
        self.transport = ZmqTransport(keys=keys, connection_limits=limits)
        self.heard: list[str | bytes] = []  # who sent what came
        self.transport.start(
            lambda peer, frames, role: self.heard.append(self.transport.find_owner(peer)),
            lambda *_: None,
            lambda *_: None,
        )
        self.place = ("127.0.0.1", int(parse_endpoint(self.transport.address).rpartition(":")[2]))

    def refused(self, why: str) -> int:
        return self.transport.rejected_connections.get(why, 0)


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
    made, pair = context.socket(zmq.DEALER), pair or KeyPair.generate()
    made.linger = 0
    made.curve_serverkey = parse_key(door.transport.address)
    made.curve_publickey, made.curve_secretkey = pair.public, pair.secret
    made.connect(parse_endpoint(door.transport.address))
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
        strangers = door.transport._authenticator._unauthenticated  # type: ignore[union-attr]
        assert strangers is not None
        await until(lambda: len(strangers._unauthenticated) == 4)
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
            member.send(begun(b"header", bytes(LIMITS.unauthenticated_bytes * 4)))
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
    strangers = UnauthenticatedPeers(LIMITS, Counter())
    reading, writing = os.pipe()
    try:
        before = descriptors_of(reading)
        strangers.add_connection(reading)
        assert descriptors_of(reading) == before >= {reading, writing}
    finally:
        os.close(reading)
        os.close(writing)


async def test_connections_that_come_and_go_are_not_counted_for_ever(door: Door) -> None:
    for _ in range(30):
        with socket.create_connection(door.place, timeout=scaled(SOON_S)) as stranger:
            assert await asyncio.to_thread(stranger.recv, 10)
    strangers = door.transport._authenticator._unauthenticated  # type: ignore[union-attr]
    assert strangers is not None
    await until(lambda: not strangers._connections and not strangers._count_by_origin, SOON_S)
    assert not strangers._unauthenticated and not strangers._unauthenticated_by_origin
    assert not door.refused("strangers")


async def test_connections_with_one_key_are_of_one_requester(door: Door) -> None:
    pair = KeyPair.generate()
    with zmq.Context() as context:
        members = [friend(door, context, pair), friend(door, context, pair), friend(door, context)]
        await until(lambda: len(door.heard) == 3, SOON_S)
        assert sorted(map(door.heard.count, set(door.heard))) == [1, 2]
        for member in members:
            member.close(0)
