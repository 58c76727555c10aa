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
from meshrl.common.base.host.settings import make_redis_user
from meshrl.common.mesh.runtime.calls.caller import WRONG_KEYS_AFTER_S
from meshrl.common.mesh.runtime.calls.directory import ActorDirectory, Route
from meshrl.common.mesh.runtime.calls.server import RequestServer
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.mesh.transport.address import (
    BULK_KEY_PREFIX,
    format_bulk_key,
    format_key,
    parse_bulk_key,
    parse_endpoint,
    parse_key,
)
from meshrl.common.mesh.transport.keys import KeyHolders, ProcessKeys
from meshrl.common.state.hosts import credentials
from meshrl.common.state.hosts.credentials import Credential
from meshrl.common.state.redis.client import StateClient, SyncRedisClient

if TYPE_CHECKING:
    from meshrl.common.mesh.process.host import Host
    from meshrl.common.mesh.runtime.lease import Lease
    from meshrl.common.state.registry import RegistryEntry

LOOKUP_TIMEOUT_S = 1.0  # for Redis to tell whose a key is: a peer waits behind
WITHDRAW_TIMEOUT_S = 2.0  # what is not taken away is removed later
REREGISTER_S = 10.0  # between two times that a process without a lease shows its key
KEY_DIGITS_IN_ERRORS = 8  # digits of a key in an error
MAX_HOLDERS_IN_ERRORS = 3  # holders of one
LOOKUPS_PER_CHECK = 5  # for so many questions, one after the other, whoever waits has patience
MAX_WRONG_KEYS = 1024  # incarnations whose keys are wrong
NODE_ROLE = "node"  # a host's agent, whose name tells the host
KEYS_FIX = "`meshrl keys` at the head lists whose keys are let in, `meshrl hosts` which hosts are"


class ProcessCredentials:
    """Of one process. `keys` are for its transport, and its bulk port."""

    def __init__(
        self,
        row: Credential,
        keys: ProcessKeys,
        state: StateClient,
        client: SyncRedisClient,
        clock: Clock,
    ) -> None:
        """`row.public` is the public half of `keys.own`, and `client` is what they ask."""
        self.row, self.keys, self._client = row, keys, client
        self._state, self._clock = state, clock
        self._registered_at = clock.monotonic()
        self._suspect_keys: set[str] = (
            set()
        )  # keys at which a handshake failed, or a call was refused
        self._is_own_key_valid = True  # with its own key, as far as is known
        self._wrong_key_since: dict[str, float] = {}  # by incarnation

    @classmethod
    async def register(
        cls,
        name: str,
        role: str,
        host: str,
        state: StateClient,
        client: SyncRedisClient,
        clock: Clock,
    ) -> ProcessCredentials:
        """Makes the key of a process and shows it; `client` is what its threads ask Redis with,
        and is closed with the doorway. Refused: its host is let in no more.
        """
        keys = ProcessKeys(
            lambda publics: credentials.lookup_owners(client, publics), clock.monotonic
        )
        row = Credential(
            role, host, keys.public_key_text, name, format_bulk_key(keys.bulk_public_key)
        )
        try:
            await credentials.register_key(state, row)
        except Refused as error:
            raise Refused(
                f"{name} is not let into the mesh: {error.message}",
                where=host,
                fix="`meshrl hosts` at the head lists who is; a new token lets this host in again",
            ) from error
        return cls(row, keys, state, client, clock)

    async def withdraw(self) -> None:
        """Takes the key away, unless Redis is away too: then it is removed when it is old."""
        try:
            async with self._clock.timeout(WITHDRAW_TIMEOUT_S, "taking the key away"):
                await credentials.withdraw_key(self._state, self.row)
        except (StateUnavailable, DeadlineExceeded):
            pass
        finally:
            self._client.close()

    async def refresh(self) -> None:
        """Shows the key again once in a while, where no lease does it. StateUnavailable; Refused
        once it was revoked.
        """
        if self._clock.monotonic() - self._registered_at > REREGISTER_S:
            await credentials.register_key(self._state, self.row)
            self._registered_at = self._clock.monotonic()

    def mark_suspect(self, address: str) -> None:
        """The process at `address` and this one do not get on: whose both keys are is asked again
        before the next call.
        """
        self._suspect_keys |= {_key_text_of(address), _bulk_key_text_of(address)}

    async def verify_peer(self, entry: RegistryEntry, host: Host, *, bulk: bool = False) -> None:
        """Returns when the key in an entry's address, or that of its bulk port, is that of who the
        entry says it is. StateUnavailable; HandshakeFailed, after a while WrongKeys.
        """
        key = _bulk_key_text_of(entry.address) if bulk else _key_text_of(entry.address)
        holders = self.keys.read_cached_holders(key)
        expected = make_redis_user(entry.name.partition("/")[0], entry.host)
        if key and (
            expected not in holders or not self._is_own_key_valid or key in self._suspect_keys
        ):
            holders = await host.run_blocking(
                self._look_up_holders, key, deadline_s=LOOKUPS_PER_CHECK * LOOKUP_TIMEOUT_S
            )
        why = self._explain_mismatch(entry, key, expected, holders)
        if not why:
            self._wrong_key_since.pop(entry.incarnation, None)
            return
        now = self._clock.monotonic()
        if len(self._wrong_key_since) >= MAX_WRONG_KEYS:
            self._wrong_key_since.clear()
        since = self._wrong_key_since.setdefault(entry.incarnation, now)
        error = WrongKeys if now - since > WRONG_KEYS_AFTER_S else HandshakeFailed
        raise error(why, where=parse_endpoint(entry.address), fix=KEYS_FIX)

    def _look_up_holders(self, key: str) -> KeyHolders:
        """Who is let in with a key: as Redis has it now, if there is doubt or others held it so
        far. Then looks at this process's own, too. Off the loop.
        """
        doubt = (
            key in self._suspect_keys
            or not self._is_own_key_valid
            or bool(self.keys.read_cached_holders(key))
        )
        whose = self.keys.refresh_key if doubt else self.keys.find_holders
        self._is_own_key_valid = make_redis_user(self.row.role, self.row.host) in whose(
            self.row.public
        )
        holders = whose(key)
        self._suspect_keys.discard(key)
        return holders

    def _explain_mismatch(
        self, entry: RegistryEntry, key: str, expected: str, holders: KeyHolders
    ) -> str:
        """What keeps this process from calling that one; empty: nothing that Redis knows of."""
        role, _, rest = entry.name.partition("/")
        if not key:
            return f"the address of {entry.name} names no key: it was started with other settings"
        if not self._is_own_key_valid:
            return (
                f"the key of this process, {self.row.public[:KEY_DIGITS_IN_ERRORS]}, is let in "
                "no more: it was "
                f"revoked, or the host {self.row.host} was expelled"
            )
        if not holders:
            return f"the key of {entry.name}, {_abbreviate_key(key)}, is nobody's who is let in"
        if expected not in holders or (role == NODE_ROLE and rest != entry.host):
            found = ", ".join(holders[:MAX_HOLDERS_IN_ERRORS])
            return (
                f"the key of {entry.name}, {_abbreviate_key(key)}, is one of {found}, not of "
                f"{expected}"
            )
        return ""


class PeerVerifier:
    """Checks of the peers of one process. Without a doorway a peer proves no more than its role."""

    def __init__(
        self,
        credentials: ProcessCredentials | None,
        host: Host,
        directory: ActorDirectory,
        server: RequestServer,
    ) -> None:
        self._credentials, self._host = credentials, host
        self._directory, self._server = directory, server
        self._has_revocations = False  # keys may have been revoked since the last look at what runs
        if credentials is not None:
            credentials.keys.add_change_listener(self._on_key_change)

    def _on_key_change(self) -> None:
        """Keys may have been revoked; from any thread."""
        self._directory.invalidate()
        self._has_revocations = True

    def mark_suspect(self, route: Route) -> None:
        """Check a peer again that does not let this process call what it may."""
        if self._credentials is not None:
            self._credentials.mark_suspect(route.address)
            self._directory.forget(route)

    def mark_address_suspect(self, address: str) -> None:
        """Check the peer at an address again, whose key was refused."""
        if self._credentials is not None:
            self._credentials.mark_suspect(address)

    async def verify(self, entry: RegistryEntry, bulk: bool = False) -> None:
        """Return once the process of an entry has proved to be that, with `bulk` by the key of its
        bulk port. StateUnavailable; HandshakeFailed.
        """
        if self._credentials is not None:
            await self._credentials.verify_peer(entry, self._host, bulk=bulk)

    async def apply_revocations(self, lease: Lease, telemetry: Telemetry) -> None:
        """End what runs for revoked keys, and show this process's key where no renewal does."""
        if self._credentials is None:
            return
        if self._has_revocations:
            self._has_revocations = False
            self._server.cancel_revoked(self._credentials.keys.read_cached_holders)
        if not lease.explain_lapse():  # a renewal shows the key
            return
        try:
            await self._credentials.refresh()
        except MeshError as error:
            telemetry.count(f"keys_not_shown_{error.code}")


def _abbreviate_key(key: str) -> str:
    return key[
        : KEY_DIGITS_IN_ERRORS + (len(BULK_KEY_PREFIX) if key.startswith(BULK_KEY_PREFIX) else 0)
    ]


def _bulk_key_text_of(address: str) -> str:
    """The key of the bulk port in an address, as doors have it; empty when there is none."""
    public = parse_bulk_key(address)
    return format_bulk_key(public) if public else ""


def _key_text_of(address: str) -> str:
    """The key in an address, in hexadecimal digits; empty when there is none."""
    public = parse_key(address)
    return format_key(public) if public else ""
