"""Registered key of a process, and its checks of the keys of processes that it calls.

A process registers its key for its role and host before it answers calls. It trusts no registry
entry: the key in the address must be registered for the role in the entry's name, on the entry's
host.
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
    parse_bulk_key,
    parse_endpoint,
    read_key_text,
)
from meshrl.common.mesh.transport.keys import KeyHolders, ProcessKeys
from meshrl.common.state.hosts import credentials
from meshrl.common.state.hosts.credentials import Credential
from meshrl.common.state.redis.client import StateClient, SyncRedisClient

if TYPE_CHECKING:
    from meshrl.common.mesh.process.host import Host
    from meshrl.common.mesh.runtime.lease import Lease
    from meshrl.common.state.registry import RegistryEntry

LOOKUP_TIMEOUT_S = 1.0  # of a key's lookup in Redis, for which a peer waits
WITHDRAW_TIMEOUT_S = 2.0  # a key that is not withdrawn is removed later
REREGISTER_S = 10.0  # seconds between two registrations of a process without a lease
KEY_DIGITS_IN_ERRORS = 8  # digits of a key in an error
MAX_HOLDERS_IN_ERRORS = 3  # holders of a key in an error
LOOKUPS_PER_CHECK = 5  # lookups in a row that one check allows time for
MAX_WRONG_KEYS = 1024  # incarnations whose keys are wrong
NODE_ROLE = "node"  # a host's agent, whose name contains the host
KEYS_FIX = (
    "Run `meshrl keys` at the head to list the admitted keys, and `meshrl hosts` to list the hosts"
)


class ProcessCredentials:
    """Credentials of one process. Its transport and its bulk port use `keys`."""

    def __init__(
        self,
        row: Credential,
        keys: ProcessKeys,
        state: StateClient,
        client: SyncRedisClient,
        clock: Clock,
    ) -> None:
        """Create credentials. `row.public` is the public half of `keys.own_pair`; `client` is the
        Redis client of `keys`.
        """
        self.row, self.keys, self._client = row, keys, client
        self._state, self._clock = state, clock
        self._registered_at = clock.monotonic()
        self._suspect_keys: set[str] = set()  # keys with a failed handshake or a rejected call
        self._is_own_key_valid = True  # as of the last lookup
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
        """Create and register the key of a process.

        Its threads query Redis through `client`, which closes with the credentials. Raises Refused
        if its host is no longer admitted.
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
                f"the mesh does not admit {name}: {error.message}",
                where=host,
                fix="Run `meshrl hosts` at the head to list the admitted hosts; join with a new "
                "token to admit this host again",
            ) from error
        return cls(row, keys, state, client, clock)

    async def withdraw(self) -> None:
        """Withdraw the key. While Redis is unavailable the key stays, and is removed when it is
        old.
        """
        try:
            async with self._clock.timeout(WITHDRAW_TIMEOUT_S, "the withdrawal of the key"):
                await credentials.withdraw_key(self._state, self.row)
        except (StateUnavailable, DeadlineExceeded):
            pass
        finally:
            self._client.close()

    async def refresh(self) -> None:
        """Register the key again every REREGISTER_S seconds where no lease renewal does.

        Raises StateUnavailable, and Refused after a revocation.
        """
        if self._clock.monotonic() - self._registered_at > REREGISTER_S:
            await credentials.register_key(self._state, self.row)
            self._registered_at = self._clock.monotonic()

    def mark_suspect(self, address: str) -> None:
        """Mark both keys of a process that rejects this one; they are looked up before the next
        call.
        """
        self._suspect_keys |= {read_key_text(address), _bulk_key_text_of(address)}

    async def verify_peer(self, entry: RegistryEntry, host: Host, *, bulk: bool = False) -> None:
        """Verify that the key in an entry's address, or of its bulk port, belongs to the entry's
        process.

        Raises StateUnavailable, HandshakeFailed, and WrongKeys if the mismatch persists.
        """
        key = _bulk_key_text_of(entry.address) if bulk else read_key_text(entry.address)
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
        """Look up the holders of a key, and verify this process's own key. Runs off the loop.

        The lookup queries Redis if a key is suspect or cached.
        """
        doubt = (
            key in self._suspect_keys
            or not self._is_own_key_valid
            or bool(self.keys.read_cached_holders(key))
        )
        whose = self.keys.refresh_key if doubt else self.keys.find_holders
        self._is_own_key_valid = make_redis_user(self.row.role, self.row.host) in whose(
            self.row.public_key
        )
        holders = whose(key)
        self._suspect_keys.discard(key)
        return holders

    def _explain_mismatch(
        self, entry: RegistryEntry, key: str, expected: str, holders: KeyHolders
    ) -> str:
        """Explain why this process cannot call the entry's process; empty if Redis shows no
        reason.
        """
        role, _, rest = entry.name.partition("/")
        if not key:
            return (
                f"the address of {entry.name} contains no key: its process was started with "
                "other settings"
            )
        if not self._is_own_key_valid:
            return (
                f"the key of this process, {self.row.public_key[:KEY_DIGITS_IN_ERRORS]}, is no "
                f"longer admitted: it was revoked, or the host {self.row.host} was expelled"
            )
        if not holders:
            return (
                f"the key of {entry.name}, {_abbreviate_key(key)}, belongs to no admitted process"
            )
        if expected not in holders or (role == NODE_ROLE and rest != entry.host):
            found = ", ".join(holders[:MAX_HOLDERS_IN_ERRORS])
            return (
                f"the key of {entry.name}, {_abbreviate_key(key)}, belongs to {found}, not to "
                f"{expected}"
            )
        return ""


class PeerVerifier:
    """Verification of one process's peers. Without credentials a peer proves only its role."""

    def __init__(
        self,
        credentials: ProcessCredentials | None,
        host: Host,
        directory: ActorDirectory,
        server: RequestServer,
    ) -> None:
        self._credentials, self._host = credentials, host
        self._directory, self._server = directory, server
        self._has_revocations = (
            False  # keys may have been revoked since the last check of running calls
        )
        if credentials is not None:
            credentials.keys.add_change_listener(self._on_key_change)

    def _on_key_change(self) -> None:
        """Note that keys may have been revoked. Runs on any thread."""
        self._directory.invalidate()
        self._has_revocations = True

    def mark_suspect(self, route: Route) -> None:
        """Verify a peer again that rejects a permitted call."""
        if self._credentials is not None:
            self._credentials.mark_suspect(route.address)
            self._directory.forget(route)

    def mark_address_suspect(self, address: str) -> None:
        """Verify the peer at an address again after its key was rejected."""
        if self._credentials is not None:
            self._credentials.mark_suspect(address)

    async def verify(self, entry: RegistryEntry, bulk: bool = False) -> None:
        """Verify the process of an entry by its key, or with `bulk` by the key of its bulk port.

        Raises StateUnavailable and HandshakeFailed.
        """
        if self._credentials is not None:
            await self._credentials.verify_peer(entry, self._host, bulk=bulk)

    async def apply_revocations(self, lease: Lease, telemetry: Telemetry) -> None:
        """Cancel calls of revoked keys, and register this process's key where no lease renewal
        does.
        """
        if self._credentials is None:
            return
        if self._has_revocations:
            self._has_revocations = False
            self._server.cancel_revoked(self._credentials.keys.read_cached_holders)
        if not lease.explain_lapse():  # the lease's renewal registers the key
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
    """Return the bulk port's key in an address, formatted as in credentials; empty if there is
    none.
    """
    public = parse_bulk_key(address)
    return format_bulk_key(public) if public else ""
