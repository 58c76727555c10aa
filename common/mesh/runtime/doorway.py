"""A process's own place at the doors of its mesh, and its look at those of whom it calls.

A process shows its key at the door of its role and host before it
answers anybody, and takes the word of no registry entry: the key in the address must stand at the
door of the role in the entry's name, on the entry's host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import (
    DeadlineExceeded,
    HandshakeFailed,
    MeshError,
    Refused,
    StateUnavailable,
    WrongKeys,
)
from meshrl.common.base.host.settings import redis_user
from meshrl.common.mesh.runtime.calls.calling import REFUSED_S
from meshrl.common.mesh.runtime.calls.directory import Directory, Route
from meshrl.common.mesh.runtime.calls.serving import Server
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.mesh.transport.address import (
    BULK,
    bulk_key_of,
    bulk_key_text,
    endpoint_of,
    key_of,
    key_text,
)
from meshrl.common.mesh.transport.keys import Holders, ProcessKeys
from meshrl.common.state.hosts import doors
from meshrl.common.state.hosts.doors import Row
from meshrl.common.state.redis.client import State, SyncClient

if TYPE_CHECKING:
    from meshrl.common.mesh.process.host import Host
    from meshrl.common.mesh.runtime.lease import Lease
    from meshrl.common.state.registry import Entry

LOOK_S = 1.0  # for Redis to tell whose a key is: a peer waits behind
LEAVE_S = 2.0  # what is not taken away is removed later
AGAIN_S = 10.0  # between two times that a process without a lease shows its key
SHOWN = 8  # digits of a key in an error
MOST_SAID = 3  # holders of one
LOOKS = 5  # for so many questions, one after the other, whoever waits has patience
REMEMBERED = 1024  # incarnations whose keys are wrong
NODE = "node"  # a host's agent, whose name tells the host
KEYS_FIX = "`meshrl keys` at the head lists whose keys are let in, `meshrl hosts` which hosts are"


class Doorway:
    """Of one process. `keys` are for its transport, and its bulk port."""

    def __init__(
        self, row: Row, keys: ProcessKeys, state: State, client: SyncClient, clock: Clock
    ) -> None:
        """`row.public` is the public half of `keys.own`, and `client` is what they ask."""
        self.row, self.keys, self._client = row, keys, client
        self._state, self._clock = state, clock
        self._shown_at = clock.monotonic()
        self._doubted: set[str] = set()  # keys at which a handshake failed, or a call was refused
        self._let_in = True  # with its own key, as far as is known
        self._wrong_since: dict[str, float] = {}  # by incarnation

    @classmethod
    async def enter(
        cls, name: str, role: str, host: str, state: State, client: SyncClient, clock: Clock
    ) -> Doorway:
        """Makes the key of a process and shows it; `client` is what its threads ask Redis with,
        and is closed with the doorway. Refused: its host is let in no more.
        """
        keys = ProcessKeys(lambda publics: doors.who(client, publics), clock.monotonic)
        row = Row(role, host, keys.public, name, bulk_key_text(keys.bulk_public))
        try:
            await doors.enter(state, row)
        except Refused as error:
            raise Refused(
                f"{name} is not let into the mesh: {error.message}",
                where=host,
                fix="`meshrl hosts` at the head lists who is; a new token lets this host in again",
            ) from error
        return cls(row, keys, state, client, clock)

    async def leave(self) -> None:
        """Takes the key away, unless Redis is away too: then it is removed when it is old."""
        try:
            async with self._clock.timeout(LEAVE_S, "taking the key away"):
                await doors.leave(self._state, self.row)
        except (StateUnavailable, DeadlineExceeded):
            pass
        finally:
            self._client.close()

    async def keep(self) -> None:
        """Shows the key again once in a while, where no lease does it. StateUnavailable; Refused
        once it was revoked.
        """
        if self._clock.monotonic() - self._shown_at > AGAIN_S:
            await doors.enter(self._state, self.row)
            self._shown_at = self._clock.monotonic()

    def doubt(self, address: str) -> None:
        """The process at `address` and this one do not get on: whose both keys are is asked again
        before the next call.
        """
        self._doubted |= {_key_in(address), _bulk_key_in(address)}

    async def check(self, entry: Entry, host: Host, *, bulk: bool = False) -> None:
        """Returns when the key in an entry's address, or that of its bulk port, is that of who the
        entry says it is. StateUnavailable; HandshakeFailed, after a while WrongKeys.
        """
        key = _bulk_key_in(entry.address) if bulk else _key_in(entry.address)
        holders = self.keys.holders_now(key)
        expected = redis_user(entry.name.partition("/")[0], entry.host)
        if key and (expected not in holders or not self._let_in or key in self._doubted):
            holders = await host.run_blocking(self._look, key, deadline_s=LOOKS * LOOK_S)
        why = self._wrong(entry, key, expected, holders)
        if not why:
            self._wrong_since.pop(entry.incarnation, None)
            return
        now = self._clock.monotonic()
        if len(self._wrong_since) >= REMEMBERED:
            self._wrong_since.clear()
        since = self._wrong_since.setdefault(entry.incarnation, now)
        error = WrongKeys if now - since > REFUSED_S else HandshakeFailed
        raise error(why, where=endpoint_of(entry.address), fix=KEYS_FIX)

    def _look(self, key: str) -> Holders:
        """Who is let in with a key: as Redis has it now, if there is doubt or others held it so
        far. Then looks at this process's own, too. Off the loop.
        """
        doubt = key in self._doubted or not self._let_in or bool(self.keys.holders_now(key))
        whose = self.keys.ask_again if doubt else self.keys.holders_of
        self._let_in = redis_user(self.row.role, self.row.host) in whose(self.row.public)
        holders = whose(key)
        self._doubted.discard(key)
        return holders

    def _wrong(self, entry: Entry, key: str, expected: str, holders: Holders) -> str:
        """What keeps this process from calling that one; empty: nothing that Redis knows of."""
        role, _, rest = entry.name.partition("/")
        if not key:
            return f"the address of {entry.name} names no key: it was started with other settings"
        if not self._let_in:
            return (
                f"the key of this process, {self.row.public[:SHOWN]}, is let in no more: it was "
                f"revoked, or the host {self.row.host} was expelled"
            )
        if not holders:
            return f"the key of {entry.name}, {_shown(key)}, is nobody's who is let in"
        if expected not in holders or (role == NODE and rest != entry.host):
            found = ", ".join(holders[:MOST_SAID])
            return f"the key of {entry.name}, {_shown(key)}, is one of {found}, not of {expected}"
        return ""


class Revocations:
    """Checks of the peers of one process. Without a doorway a peer proves no more than its role."""

    def __init__(
        self, doorway: Doorway | None, host: Host, directory: Directory, server: Server
    ) -> None:
        self._doorway, self._host = doorway, host
        self._directory, self._server = directory, server
        self._expelling = False  # keys may have been revoked since the last look at what runs
        if doorway is not None:
            doorway.keys.heed(self._doubt_all)

    def _doubt_all(self) -> None:
        """Keys may have been revoked; from any thread."""
        self._directory.doubt()
        self._expelling = True

    def doubt(self, route: Route) -> None:
        """Check a peer again that does not let this process call what it may."""
        if self._doorway is not None:
            self._doorway.doubt(route.address)
            self._directory.forget(route)

    def doubt_address(self, address: str) -> None:
        """Check the peer at an address again, whose key was refused."""
        if self._doorway is not None:
            self._doorway.doubt(address)

    async def check(self, entry: Entry, bulk: bool = False) -> None:
        """Return once the process of an entry has proved to be that, with `bulk` by the key of its
        bulk port. StateUnavailable; HandshakeFailed.
        """
        if self._doorway is not None:
            await self._doorway.check(entry, self._host, bulk=bulk)

    async def keep(self, lease: Lease, telemetry: Telemetry) -> None:
        """End what runs for revoked keys, and show this process's key where no renewal does."""
        if self._doorway is None:
            return
        if self._expelling:
            self._expelling = False
            self._server.expel(self._doorway.keys.holders_now)
        if not lease.lapsed():  # a renewal shows the key
            return
        try:
            await self._doorway.keep()
        except MeshError as error:
            telemetry.count(f"keys_not_shown_{error.code}")


def _shown(key: str) -> str:
    return key[: SHOWN + (len(BULK) if key.startswith(BULK) else 0)]


def _bulk_key_in(address: str) -> str:
    """The key of the bulk port in an address, as doors have it; empty when there is none."""
    public = bulk_key_of(address)
    return bulk_key_text(public) if public else ""


def _key_in(address: str) -> str:
    """The key in an address, in hexadecimal digits; empty when there is none."""
    public = key_of(address)
    return key_text(public) if public else ""
