"""CURVE key pairs of a mesh: one per process, and one per access token of an outside user."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from meshrl.common.base.errors import StateUnavailable, WrongKeys
from meshrl.common.mesh.transport.address import (
    format_address,
    format_key,
    parse_bulk_key,
    parse_key,
)

KEY_CHARACTERS = 40  # of a key in Z85
MAX_KNOWN_KEYS = 1024  # cached keys before a process checks which of them were revoked
KEYS_PER_QUERY = 64  # keys per query, which blocks Redis for milliseconds with ten hosts
# Seconds without a query after Redis did not answer: waiting peers are rejected and retry.
REDIS_BACKOFF_S = 1.0

# Holders of a key, each as role@host: any process with credentials may have registered it.
KeyHolders = tuple[str, ...]
LookUpHolders = Callable[[Sequence[str]], Sequence[KeyHolders]]


@dataclass(frozen=True)
class KeyPair:
    """Key pair for CURVE; both halves are 40 characters of Z85, the format of ZeroMQ."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def from_secret(cls, secret: bytes) -> KeyPair:
        """Return the pair with this secret half; raise ValueError if the secret is invalid."""
        return cls(zmq.curve_public(secret), secret)

    @classmethod
    def generate(cls) -> KeyPair:
        """Generate a fresh key pair."""
        return cls(*zmq.curve_keypair())


class TransportKeys(Protocol):
    """Key pair of one end of a connection, and its view of the keys of other processes."""

    @property
    def own_pair(self) -> KeyPair:
        """Key pair that this end authenticates with."""

    def find_expected_key(self, address: str) -> bytes:
        """Return the public key that the server at `address` must have."""

    def make_address(self, endpoint: str) -> str:
        """Return the address under which other processes find the listener at `endpoint`."""

    def find_roles(self, public: bytes) -> str | None:
        """Return the roles of a caller with this public key, separated by blanks; None rejects the
        caller.

        Runs on the ZAP authenticator's thread. Raises StateUnavailable while the roles cannot be
        looked up; the caller may retry.
        """

    def make_user_id(self, public: bytes, role: str) -> str:
        """Return the user id that the connection of an admitted caller carries, for
        `find_current_roles`.
        """

    def find_current_roles(self, user: str) -> str:
        """Return the current roles of a caller by its user id; empty if its key is no longer
        registered. Never blocks.
        """

    def add_change_listener(self, changed: Callable[[], None]) -> None:
        """Register `changed`, called from any thread whenever a result of `find_current_roles` may
        differ.
        """


def extract_roles(holders: KeyHolders) -> str:
    """Return the roles of all role@host holders, sorted and separated by blanks.

    A caller owns the private half of its key, so it may do what any holder of the key may do. A
    registration of the same key by another process removes no rights.
    """
    return " ".join(sorted({holder.partition("@")[0] for holder in holders}))


class ProcessKeys:
    """Key pairs of one process, and a cache of the holders of other processes' keys.

    `find_holders` and `refresh_key` may block on Redis: call them on threads.
    """

    def __init__(self, look_up_holders: LookUpHolders, monotonic: Callable[[], float]) -> None:
        """Create the key pairs and an empty cache.

        Args:
            look_up_holders: returns the current holders of public keys (hexadecimal digits) from
                Redis; raises StateUnavailable.
            monotonic: clock in seconds.
        """
        self.own_pair = KeyPair.generate()
        self.bulk_private_key = X25519PrivateKey.generate()  # for bulk ports: one pair per protocol
        self._look_up_holders, self._monotonic = look_up_holders, monotonic
        self._known: dict[
            str, KeyHolders
        ] = {}  # by key; replaced atomically, so that reads need no lock
        self._revocation_count: int | None = None  # revocations at the last full query
        self._max_known = MAX_KNOWN_KEYS
        self._lock = threading.Lock()
        self._change_listeners: list[Callable[[], None]] = []
        self._silent_until = -math.inf

    @property
    def public_key_text(self) -> str:
        """Public key of this process, in hexadecimal digits."""
        return format_key(self.own_pair.public)

    @property
    def bulk_public_key(self) -> bytes:
        """Public key of this process's bulk port and of its bulk clients: 32 bytes."""
        return self.bulk_private_key.public_key().public_bytes_raw()

    def make_address(self, endpoint: str) -> str:
        """Return the endpoint with this process's public keys appended."""
        return format_address(endpoint, self.own_pair.public, self.bulk_public_key)

    def find_expected_key(self, address: str) -> bytes:
        """Return the public key that the address names; raise WrongKeys if it names none."""
        public = parse_key(address)
        if len(public) != KEY_CHARACTERS:
            raise _make_missing_key_error(address)
        return public

    def find_expected_bulk_key(self, address: str) -> bytes:
        """Return the bulk port's public key that the address names; raise WrongKeys if it names
        none.
        """
        if not (public := parse_bulk_key(address)):
            raise _make_missing_key_error(address)
        return public

    def find_roles(self, public: bytes) -> str | None:
        """Return the roles of this key's holders; None if the key is not registered. Raises
        StateUnavailable.
        """
        return extract_roles(self.find_holders(format_key(public))) or None

    def find_holders(self, key: str) -> KeyHolders:
        """Return the holders of this key (hexadecimal digits); query Redis on the first request.

        Raises StateUnavailable, and does so for REDIS_BACKOFF_S seconds without another query.
        """
        if holders := self._known.get(key):
            return holders
        with self._lock:
            if self._monotonic() < self._silent_until:
                raise StateUnavailable(
                    "Redis did not answer the last lookup of a key's owner", where=key
                )
            try:
                [holders] = self._look_up_holders([key])
            except StateUnavailable:
                self._silent_until = self._monotonic() + REDIS_BACKOFF_S
                raise
            if holders:
                self._known = {**self._known, key: holders}
        return holders

    def read_cached_holders(self, key: str) -> KeyHolders:
        """Return the cached holders of this key. Never blocks."""
        return self._known.get(key, ())

    def make_user_id(self, public: bytes, role: str) -> str:
        """Return the key: the rights of a key can change."""
        return format_key(public)

    def find_current_roles(self, user: str) -> str:
        """Return the roles of this key's cached holders."""
        return extract_roles(self.read_cached_holders(user))

    def refresh_key(self, key: str) -> KeyHolders:
        """Query the holders of this key, whatever is cached. StateUnavailable leaves the cache
        unchanged.
        """
        with self._lock:
            [holders] = self._look_up_holders([key])
            others = {known: who for known, who in self._known.items() if known != key}
            self._known = {**others, key: holders} if holders else others
        for changed in self._change_listeners:
            changed()
        return holders

    def refresh_keys(self, revocation_count: int) -> None:
        """Query the holders of all cached keys again once the number of revocations has changed.

        Keys without holders leave the cache. The query also runs when very many keys are cached.
        While Redis is unavailable the cache stays, and the next call retries.
        """
        with self._lock:
            if revocation_count == self._revocation_count and len(self._known) <= self._max_known:
                return
            keys = list(self._known)
            found: list[KeyHolders] = []
            try:
                for at in range(0, len(keys), KEYS_PER_QUERY):
                    found += self._look_up_holders(keys[at : at + KEYS_PER_QUERY])
            except StateUnavailable:
                return
            self._known = {key: who for key, who in zip(keys, found, strict=True) if who}
            self._revocation_count, self._max_known = (
                revocation_count,
                max(MAX_KNOWN_KEYS, 2 * len(self._known)),
            )
        for changed in self._change_listeners:
            changed()

    def add_change_listener(self, changed: Callable[[], None]) -> None:
        """Register `changed`, called after each query of `refresh_key` and `refresh_keys`."""
        self._change_listeners.append(changed)


def _make_missing_key_error(address: str) -> WrongKeys:
    return WrongKeys(
        "this address contains no key, but each process of this mesh has one",
        where=address,
        fix="The process there has other settings than this mesh: run `meshrl down` to stop "
        "leftover processes",
    )


class TokenKeys:
    """Keys of connections that an access token opens, at the gateway or at the token's user.

    A role lasts as long as its connection.
    """

    def __init__(
        self,
        own: KeyPair,
        gateway_key: bytes,
        find_holder: Callable[[bytes], str | None] = lambda public: None,
    ) -> None:
        """Create the keys of one end.

        Args:
            own: key pair of this end.
            gateway_key: public key of the gateway.
            find_holder: returns the id of the valid token with a public key, or None.
        """
        self.own_pair, self._gateway_key, self._find_holder = own, gateway_key, find_holder

    def find_expected_key(self, address: str) -> bytes:
        """Return the gateway's key: the gateway is the only server."""
        return self._gateway_key

    def make_address(self, endpoint: str) -> str:
        """Return the endpoint: each permitted caller has the gateway's key."""
        return endpoint

    def find_roles(self, public: bytes) -> str | None:
        """Return the id of the token with this public key; None rejects the caller."""
        return self._find_holder(public)

    def make_user_id(self, public: bytes, role: str) -> str:
        """Return the role itself."""
        return role

    def find_current_roles(self, user: str) -> str:
        """Return the role that the connection was opened with."""
        return user

    def add_change_listener(self, changed: Callable[[], None]) -> None:
        """Ignore the listener: no result changes."""
