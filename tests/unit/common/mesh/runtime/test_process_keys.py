"""Process keys, and limits for connections that have not proved one."""

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
from meshrl.common.mesh.transport.keys import (
    MAX_KNOWN_KEYS,
    REDIS_BACKOFF_S,
    KeyPair,
    ProcessKeys,
)
from meshrl.common.mesh.transport.unauthenticated_peers import (
    ConnectionLimits,
    UnauthenticatedPeers,
)
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from tests.descriptors import find_equal_descriptors
from tests.load import scaled
from tests.meshes import encode_first_frame
from tests.unit.common.mesh.runtime.talking import until

HOST = "gpu1-1f3a9c"
SOON_S = 20.0
LIMITS = ConnectionLimits(
    per_address=12, unauthenticated=20, unauthenticated_per_address=5, unauthenticated_bytes=10_000
)
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00CURVE".ljust(22, b"\0") + bytes(32)


@dataclass
class KeyTable:
    """Owners of keys, as Redis would return them."""

    holders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_unreachable: bool = False
    lookup_count: int = 0
    now: float = 0.0

    def lookup_owners(self, keys: Sequence[str]) -> list[tuple[str, ...]]:
        self.lookup_count += 1
        if self.is_unreachable:
            raise StateUnavailable("Redis does not answer")
        return [self.holders.get(key, ()) for key in keys]

    def make_keys(self) -> ProcessKeys:
        return ProcessKeys(self.lookup_owners, lambda: self.now)

    def add_key(self, role: str) -> bytes:
        """Add a new key of a role and return it."""
        public = KeyPair.generate().public
        self.holders[format_key(public)] = (f"{role}@{HOST}",)
        return public


def test_each_process_has_its_own_key_pair() -> None:
    table = KeyTable()
    own_keys, other = table.make_keys(), table.make_keys()
    assert own_keys.own_pair != other.own_pair
    assert own_keys.own_pair.secret.decode() not in repr(own_keys.own_pair)
    address = other.make_address("tcp://[::1]:5")
    assert parse_endpoint(address) == "tcp://[::1]:5"
    assert own_keys.find_expected_key(address) == other.own_pair.public
    pair = KeyPair.generate()
    assert format_address("tcp://h:1", pair.public) == f"tcp://h:1#{format_key(pair.public)}"


@pytest.mark.parametrize("address", ["tcp://a:1", "tcp://a:1#", "tcp://a:1#zz", "tcp://a:1#abcd"])
def test_address_without_a_key_is_rejected(address: str) -> None:
    with pytest.raises(WrongKeys, match=r"contains no key.*`meshrl down`"):
        KeyTable().make_keys().find_expected_key(address)


def test_known_keys_are_cached_and_unknown_keys_are_looked_up_each_time() -> None:
    table = KeyTable()
    keys, engine, unknown_key = (
        table.make_keys(),
        table.add_key("engine"),
        KeyPair.generate().public,
    )
    assert [keys.find_roles(engine) for _ in range(3)] == ["engine"] * 3
    assert table.lookup_count == 1
    assert keys.find_roles(unknown_key) is None
    table.holders[format_key(unknown_key)] = (f"worker@{HOST}",)  # the first lookup came too early
    assert keys.find_roles(unknown_key) == "worker"
    assert keys.find_current_roles(keys.make_user_id(engine, "engine")) == "engine"


def test_known_keys_are_accepted_while_redis_is_unreachable() -> None:
    table = KeyTable()
    keys, known, unknown = table.make_keys(), table.add_key("engine"), table.add_key("worker")
    keys.find_roles(known)
    table.is_unreachable = True
    assert keys.find_roles(known) == "engine"
    for _ in range(5):
        with pytest.raises(StateUnavailable):
            keys.find_roles(unknown)
    assert table.lookup_count == 2, "nobody waits for each of them"
    table.is_unreachable, table.now = False, REDIS_BACKOFF_S
    assert keys.find_roles(unknown) == "worker"


def test_revoked_key_is_forgotten_when_the_revocation_number_rises() -> None:
    table, changes = KeyTable(), []
    keys, one, two = table.make_keys(), table.add_key("engine"), table.add_key("worker")
    keys.add_change_listener(lambda: changes.append("changed"))
    keys.refresh_keys(0)
    users = [keys.make_user_id(key, keys.find_roles(key) or "") for key in (one, two)]
    before = table.lookup_count
    keys.refresh_keys(0)
    assert table.lookup_count == before, "nothing has changed"
    del table.holders[format_key(one)]
    table.is_unreachable, changes[:] = True, []
    keys.refresh_keys(1)
    assert keys.find_current_roles(users[0]) == "engine" and not changes
    table.is_unreachable = False
    keys.refresh_keys(1)
    assert [keys.find_current_roles(user) for user in users] == ["", "worker"] and changes
    keys.refresh_keys(0)  # a rolled-back Redis: its answers count again
    assert table.lookup_count == before + 3


def test_refreshed_key_is_kept_until_redis_answers() -> None:
    table, changes = KeyTable(), []
    keys, engine = table.make_keys(), table.add_key("engine")
    keys.add_change_listener(lambda: changes.append("changed"))
    key = keys.make_user_id(engine, keys.find_roles(engine) or "")
    table.is_unreachable = True
    with pytest.raises(StateUnavailable):
        keys.refresh_key(key)
    assert keys.find_current_roles(key) == "engine" and not changes
    table.is_unreachable = False
    assert keys.refresh_key(key) == (f"engine@{HOST}",)
    del table.holders[key]
    assert keys.refresh_key(key) == ()
    assert keys.find_current_roles(key) == "" and len(changes) == 2


def test_keys_of_exited_processes_are_evicted() -> None:
    table = KeyTable()
    keys = table.make_keys()
    keys.refresh_keys(0)
    for _ in range(MAX_KNOWN_KEYS + 1):
        keys.find_roles(table.add_key("rank"))
    table.holders.clear()
    last_key = table.add_key("engine")
    keys.find_roles(last_key)
    keys.refresh_keys(0)
    assert len(keys._known) == 1 and keys.find_current_roles(format_key(last_key)) == "engine"


def test_key_with_several_owners_keeps_its_roles() -> None:
    table = KeyTable()
    keys, trainer = table.make_keys(), table.add_key("trainer")
    table.holders[format_key(trainer)] += ("engine@gpu2-77aa01", "trainer@gpu2-77aa01")
    assert (
        keys.find_roles(trainer) == keys.find_current_roles(format_key(trainer)) == "engine trainer"
    )


class ListeningTransport:
    """Transport that accepts every key, with the owners of the messages it received."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        keys = ProcessKeys(lambda keys: [("engine@here",) for _ in keys], lambda: 0.0)
        self.transport = ZmqTransport(keys=keys, connection_limits=limits)
        self.owners: list[str | bytes] = []  # owners of the received messages
        self.transport.start(
            lambda peer, frames, role: self.owners.append(self.transport.find_owner(peer)),
            lambda *_: None,
            lambda *_: None,
        )
        self.socket_address = (
            "127.0.0.1",
            int(parse_endpoint(self.transport.address).rpartition(":")[2]),
        )

    def count_rejected(self, why: str) -> int:
        return self.transport.rejected_connections.get(why, 0)


@pytest.fixture
async def listener() -> AsyncIterator[ListeningTransport]:
    listener = ListeningTransport()
    yield listener
    await listener.transport.close()


def connect(listener: ListeningTransport, stack: ExitStack) -> socket.socket:
    connection = stack.enter_context(
        socket.create_connection(listener.socket_address, timeout=scaled(SOON_S))
    )
    connection.setblocking(False)
    return connection


def is_open(end: socket.socket) -> bool:
    """Return True if the other end has not closed the connection."""
    try:
        while end.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def open_member(
    listener: ListeningTransport,
    context: zmq.Context[zmq.Socket[bytes]],
    pair: KeyPair | None = None,
) -> zmq.Socket[bytes]:
    """Open an authenticated connection and send a message over it."""
    member, pair = context.socket(zmq.DEALER), pair or KeyPair.generate()
    member.linger = 0
    member.curve_serverkey = parse_key(listener.transport.address)
    member.curve_publickey, member.curve_secretkey = pair.public, pair.secret
    member.connect(parse_endpoint(listener.transport.address))
    member.send(encode_first_frame(b"header", b"body"))
    return member


def has_received_more(listener: ListeningTransport, than: int) -> bool:
    return len(listener.owners) > than


async def test_unauthenticated_connections_per_address_are_limited(
    listener: ListeningTransport,
) -> None:
    with ExitStack() as stack:
        connections = [connect(listener, stack) for _ in range(9)]
        await until(lambda: listener.count_rejected("strangers") == 4, SOON_S)
        await until(lambda: sum(map(is_open, connections)) == 5, SOON_S)
        assert all(map(is_open, connections[:5])), "those that came first stay"
        connections[0].close()
        unauthenticated = listener.transport._authenticator._unauthenticated  # type: ignore[union-attr]
        assert unauthenticated is not None
        await until(lambda: len(unauthenticated._unauthenticated) == 4)
        late_connection = connect(listener, stack)
        late_connection.setblocking(True)
        assert await asyncio.to_thread(late_connection.recv, 10), "there is room again"


async def test_authenticated_peers_may_send_any_amount(
    listener: ListeningTransport,
) -> None:
    with zmq.Context() as context:
        members = []
        for number in range(8):  # in sequence: more than five unauthenticated at once are rejected
            members.append(open_member(listener, context))
            await until(partial(has_received_more, listener, number), SOON_S)
        for member in members:
            member.send(encode_first_frame(b"header", bytes(LIMITS.unauthenticated_bytes * 4)))
        await until(lambda: len(listener.owners) == 16, SOON_S)
        await asyncio.sleep(0.6)  # two checks
        members[0].send(encode_first_frame(b"header", b"body"))
        await until(lambda: len(listener.owners) == 17, SOON_S)
        for member in members:
            member.close(0)
    assert not listener.count_rejected("strangers") and not listener.count_rejected("bytes")


async def test_connections_per_address_are_limited(listener: ListeningTransport) -> None:
    with zmq.Context() as context:
        members = []  # keeps the connections open
        for number in range(12):
            members.append(open_member(listener, context))
            await until(partial(has_received_more, listener, number), SOON_S)
        members.append(open_member(listener, context))
        await until(lambda: listener.count_rejected("connections"), SOON_S)
        assert len(listener.owners) == 12
        context.destroy(0)


async def test_unauthenticated_peer_that_keeps_sending_is_disconnected(
    listener: ListeningTransport,
) -> None:
    """Check a peer that announces one long command, which ZeroMQ would accept completely."""
    with socket.create_connection(listener.socket_address, timeout=scaled(SOON_S)) as connection:
        connection.sendall(GREETING + b"\x06" + (100 << 20).to_bytes(8, "big"))

        def send_until_rejected() -> None:
            deadline = time.monotonic() + scaled(SOON_S)
            with suppress(OSError):
                while time.monotonic() < deadline:
                    connection.send(bytes(4096))
                    time.sleep(0.001)  # outlast the interval of the periodic check

        await asyncio.to_thread(send_until_rejected)
        await until(lambda: listener.count_rejected("bytes") == 1, SOON_S)


def test_descriptor_reused_by_a_file_is_not_closed() -> None:
    unauthenticated = UnauthenticatedPeers(LIMITS, Counter())
    reading, writing = os.pipe()
    try:
        before = find_equal_descriptors(reading)
        unauthenticated.add_connection(reading)
        assert find_equal_descriptors(reading) == before >= {reading, writing}
    finally:
        os.close(reading)
        os.close(writing)


async def test_closed_connections_are_no_longer_counted(listener: ListeningTransport) -> None:
    for _ in range(30):
        with socket.create_connection(
            listener.socket_address, timeout=scaled(SOON_S)
        ) as connection:
            assert await asyncio.to_thread(connection.recv, 10)
    unauthenticated = listener.transport._authenticator._unauthenticated  # type: ignore[union-attr]
    assert unauthenticated is not None
    await until(
        lambda: not unauthenticated._connections and not unauthenticated._count_by_origin, SOON_S
    )
    assert not unauthenticated._unauthenticated and not unauthenticated._unauthenticated_by_origin
    assert not listener.count_rejected("strangers")


async def test_connections_with_one_key_have_one_owner(listener: ListeningTransport) -> None:
    pair = KeyPair.generate()
    with zmq.Context() as context:
        members = [
            open_member(listener, context, pair),
            open_member(listener, context, pair),
            open_member(listener, context),
        ]
        await until(lambda: len(listener.owners) == 3, SOON_S)
        assert sorted(map(listener.owners.count, set(listener.owners))) == [1, 2]
        for member in members:
            member.close(0)
