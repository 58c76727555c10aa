"""CURVE key pairs of a mesh: one for each process, and one for each token of people outside."""

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
MAX_KNOWN_KEYS = 1024  # keys that a process remembers before it looks which of them have gone
KEYS_PER_QUERY = (
    64  # keys in one question to Redis, which answers nobody else meanwhile: ms, of ten hosts
)
# Without asking again after Redis did not answer: the peers that wait behind are told to try again.
REDIS_BACKOFF_S = 1.0

# Whose a key is, each as role@host: anybody who stands at a door may have entered it there.
KeyHolders = tuple[str, ...]
LookUpHolders = Callable[[Sequence[str]], Sequence[KeyHolders]]


@dataclass(frozen=True)
class KeyPair:
    """A key pair for CURVE; both halves are 40 characters of Z85, as ZeroMQ takes them."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def from_secret(cls, secret: bytes) -> KeyPair:
        """The pair that has this secret half; ValueError when it is none."""
        return cls(zmq.curve_public(secret), secret)

    @classmethod
    def generate(cls) -> KeyPair:
        """A pair that nobody else has."""
        return cls(*zmq.curve_keypair())


class TransportKeys(Protocol):
    """What one end of connections proves itself with, and knows the others by."""

    @property
    def own_pair(self) -> KeyPair:
        """The pair that this end proves."""

    def find_expected_key(self, address: str) -> bytes:
        """The public key that who answers at `address` must have."""

    def make_address(self, endpoint: str) -> str:
        """The address under which others find who listens at `endpoint`."""

    def find_roles(self, public: bytes) -> str | None:
        """What a caller with this public key is, roles with blanks between them; None: nobody, and
        it is turned away. Runs on the doorkeeper's thread. StateUnavailable: nobody can tell now,
        and it is to try again.
        """

    def make_user_id(self, public: bytes, role: str) -> str:
        """What is noted at a connection of an admitted caller, for `role_now`."""

    def find_current_roles(self, user: str) -> str:
        """The roles of a caller at every request, by what was noted; empty: it is nobody's any
        more. Never waits.
        """

    def add_change_listener(self, changed: Callable[[], None]) -> None:
        """Has `changed` called, from any thread, whenever an answer of `role_now` may differ."""


def extract_roles(holders: KeyHolders) -> str:
    """The roles in each role@host, with blanks between them. Who calls has the other half of its
    key, so what it may do is what any holder may: to be entered by others takes nothing from it.
    """
    return " ".join(sorted({holder.partition("@")[0] for holder in holders}))


class ProcessKeys:
    """What one process proves itself with, and what it knows of the keys of others. `role_of` and
    `refresh` may wait for Redis, and are for threads.
    """

    def __init__(self, look_up_holders: LookUpHolders, monotonic: Callable[[], float]) -> None:
        """`whose`: the holders of public keys in hexadecimal digits, as Redis has them now;
        StateUnavailable.
        """
        self.own_pair = KeyPair.generate()
        self.bulk_private_key = (
            X25519PrivateKey.generate()
        )  # of bulk ports: one pair serves one protocol
        self._look_up_holders, self._monotonic = look_up_holders, monotonic
        self._known: dict[str, KeyHolders] = {}  # by key; replaced as a whole: read unlocked
        self._revocation_count: int | None = None  # of revocations when all that is known was true
        self._max_known = MAX_KNOWN_KEYS
        self._lock = threading.Lock()
        self._change_listeners: list[Callable[[], None]] = []
        self._silent_until = -math.inf

    @property
    def public_key_text(self) -> str:
        """Its own public key, in hexadecimal digits."""
        return format_key(self.own_pair.public)

    @property
    def bulk_public_key(self) -> bytes:
        """The public key of its bulk port, and of who asks at those of others: 32 bytes."""
        return self.bulk_private_key.public_key().public_bytes_raw()

    def make_address(self, endpoint: str) -> str:
        """The endpoint with this process's keys behind it."""
        return format_address(endpoint, self.own_pair.public, self.bulk_public_key)

    def find_expected_key(self, address: str) -> bytes:
        """The key in the address; WrongKeys when it names none."""
        public = parse_key(address)
        if len(public) != KEY_CHARACTERS:
            raise _make_missing_key_error(address)
        return public

    def find_expected_bulk_key(self, address: str) -> bytes:
        """The key of the bulk port of who answers at `address`; WrongKeys when it names none."""
        if not (public := parse_bulk_key(address)):
            raise _make_missing_key_error(address)
        return public

    def find_roles(self, public: bytes) -> str | None:
        """The roles of who holds this key; None: nobody who is let in. StateUnavailable."""
        return extract_roles(self.find_holders(format_key(public))) or None

    def find_holders(self, key: str) -> KeyHolders:
        """Who holds this key (hexadecimal digits), asked of Redis the first time. StateUnavailable,
        for a while without asking again.
        """
        if holders := self._known.get(key):
            return holders
        with self._lock:
            if self._monotonic() < self._silent_until:
                raise StateUnavailable("Redis has just not answered whose key this is", where=key)
            try:
                [holders] = self._look_up_holders([key])
            except StateUnavailable:
                self._silent_until = self._monotonic() + REDIS_BACKOFF_S
                raise
            if holders:
                self._known = {**self._known, key: holders}
        return holders

    def read_cached_holders(self, key: str) -> KeyHolders:
        """Who holds this key, as far as is known. Never waits."""
        return self._known.get(key, ())

    def make_user_id(self, public: bytes, role: str) -> str:
        """The key: what it may do can change."""
        return format_key(public)

    def find_current_roles(self, user: str) -> str:
        """What the holders of this key are, as far as is known."""
        return extract_roles(self.read_cached_holders(user))

    def refresh_key(self, key: str) -> KeyHolders:
        """Who holds this key now, whatever was known. StateUnavailable: what was known stays."""
        with self._lock:
            [holders] = self._look_up_holders([key])
            others = {known: who for known, who in self._known.items() if known != key}
            self._known = {**others, key: holders} if holders else others
        for changed in self._change_listeners:
            changed()
        return holders

    def refresh_keys(self, revocation_count: int) -> None:
        """Asks again whose the known keys are once `number`, of revocations, has changed, and
        forgets whose they are no more; also when very many are known, of which most have gone.
        While Redis is silent nothing is forgotten, and the next call tries again.
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
        """`changed` runs after each `refresh` and `ask_again` that asked."""
        self._change_listeners.append(changed)


def _make_missing_key_error(address: str) -> WrongKeys:
    return WrongKeys(
        "this address names no key, and each process of this mesh has one",
        where=address,
        fix="What answers there was not started with the settings of this mesh: "
        "`meshrl down` stops what is left",
    )


class TokenKeys:
    """Keys of connections that tokens open: of the gateway, or of a holder. A role lasts
    as long as its connection.
    """

    def __init__(
        self,
        own: KeyPair,
        gateway_key: bytes,
        find_holder: Callable[[bytes], str | None] = lambda public: None,
    ) -> None:
        """`gateway`: its public key. `holder`: the id of the good token with a public key."""
        self.own_pair, self._gateway_key, self._find_holder = own, gateway_key, find_holder

    def find_expected_key(self, address: str) -> bytes:
        """The gateway's key: it is called, and calls nobody."""
        return self._gateway_key

    def make_address(self, endpoint: str) -> str:
        """The endpoint: whoever may call knows the key."""
        return endpoint

    def find_roles(self, public: bytes) -> str | None:
        """The id of a token; None: nobody is let in with this key."""
        return self._find_holder(public)

    def make_user_id(self, public: bytes, role: str) -> str:
        """The role itself."""
        return role

    def find_current_roles(self, user: str) -> str:
        """As it was when it came in."""
        return user

    def add_change_listener(self, changed: Callable[[], None]) -> None:
        """No answer changes."""
