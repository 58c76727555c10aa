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
from meshrl.common.mesh.transport.address import bulk_key_of, key_of, key_text, keyed

KEY_CHARACTERS = 40  # of a key in Z85
KNOWN = 1024  # keys that a process remembers before it looks which of them have gone
ASKED = 64  # keys in one question to Redis, which answers nobody else meanwhile: ms, of ten hosts
# Without asking again after Redis did not answer: the peers that wait behind are told to try again.
SILENT_S = 1.0

# Whose a key is, each as role@host: anybody who stands at a door may have entered it there.
Holders = tuple[str, ...]
Whose = Callable[[Sequence[str]], Sequence[Holders]]


@dataclass(frozen=True)
class KeyPair:
    """A key pair for CURVE; both halves are 40 characters of Z85, as ZeroMQ takes them."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> KeyPair:
        """The pair that has this secret half; ValueError when it is none."""
        return cls(zmq.curve_public(secret), secret)

    @classmethod
    def new(cls) -> KeyPair:
        """A pair that nobody else has."""
        return cls(*zmq.curve_keypair())


class Keys(Protocol):
    """What one end of connections proves itself with, and knows the others by."""

    @property
    def own(self) -> KeyPair:
        """The pair that this end proves."""

    def asked(self, address: str) -> bytes:
        """The public key that who answers at `address` must have."""

    def published(self, endpoint: str) -> str:
        """The address under which others find who listens at `endpoint`."""

    def role_of(self, public: bytes) -> str | None:
        """What a caller with this public key is, roles with blanks between them; None: nobody, and
        it is turned away. Runs on the doorkeeper's thread. StateUnavailable: nobody can tell now,
        and it is to try again.
        """

    def user_of(self, public: bytes, role: str) -> str:
        """What is noted at a connection of an admitted caller, for `role_now`."""

    def role_now(self, user: str) -> str:
        """The roles of a caller at every request, by what was noted; empty: it is nobody's any
        more. Never waits.
        """

    def heed(self, changed: Callable[[], None]) -> None:
        """Has `changed` called, from any thread, whenever an answer of `role_now` may differ."""


def roles_in(holders: Holders) -> str:
    """The roles in each role@host, with blanks between them. Who calls has the other half of its
    key, so what it may do is what any holder may: to be entered by others takes nothing from it.
    """
    return " ".join(sorted({holder.partition("@")[0] for holder in holders}))


class ProcessKeys:
    """What one process proves itself with, and what it knows of the keys of others. `role_of` and
    `refresh` may wait for Redis, and are for threads.
    """

    def __init__(self, whose: Whose, monotonic: Callable[[], float]) -> None:
        """`whose`: the holders of public keys in hexadecimal digits, as Redis has them now;
        StateUnavailable.
        """
        self.own = KeyPair.new()
        self.bulk = X25519PrivateKey.generate()  # of bulk ports: one pair serves one protocol
        self._whose, self._monotonic = whose, monotonic
        self._known: dict[str, Holders] = {}  # by key; replaced as a whole: read unlocked
        self._number: int | None = None  # of revocations when all that is known was true
        self._most = KNOWN
        self._lock = threading.Lock()
        self._heeding: list[Callable[[], None]] = []
        self._silent_until = -math.inf

    @property
    def public(self) -> str:
        """Its own public key, in hexadecimal digits."""
        return key_text(self.own.public)

    @property
    def bulk_public(self) -> bytes:
        """The public key of its bulk port, and of who asks at those of others: 32 bytes."""
        return self.bulk.public_key().public_bytes_raw()

    def published(self, endpoint: str) -> str:
        """The endpoint with this process's keys behind it."""
        return keyed(endpoint, self.own.public, self.bulk_public)

    def asked(self, address: str) -> bytes:
        """The key in the address; WrongKeys when it names none."""
        public = key_of(address)
        if len(public) != KEY_CHARACTERS:
            raise _without_key(address)
        return public

    def bulk_asked(self, address: str) -> bytes:
        """The key of the bulk port of who answers at `address`; WrongKeys when it names none."""
        if not (public := bulk_key_of(address)):
            raise _without_key(address)
        return public

    def role_of(self, public: bytes) -> str | None:
        """The roles of who holds this key; None: nobody who is let in. StateUnavailable."""
        return roles_in(self.holders_of(key_text(public))) or None

    def holders_of(self, key: str) -> Holders:
        """Who holds this key (hexadecimal digits), asked of Redis the first time. StateUnavailable,
        for a while without asking again.
        """
        if holders := self._known.get(key):
            return holders
        with self._lock:
            if self._monotonic() < self._silent_until:
                raise StateUnavailable("Redis has just not answered whose key this is", where=key)
            try:
                [holders] = self._whose([key])
            except StateUnavailable:
                self._silent_until = self._monotonic() + SILENT_S
                raise
            if holders:
                self._known = {**self._known, key: holders}
        return holders

    def holders_now(self, key: str) -> Holders:
        """Who holds this key, as far as is known. Never waits."""
        return self._known.get(key, ())

    def user_of(self, public: bytes, role: str) -> str:
        """The key: what it may do can change."""
        return key_text(public)

    def role_now(self, user: str) -> str:
        """What the holders of this key are, as far as is known."""
        return roles_in(self.holders_now(user))

    def ask_again(self, key: str) -> Holders:
        """Who holds this key now, whatever was known. StateUnavailable: what was known stays."""
        with self._lock:
            [holders] = self._whose([key])
            others = {known: who for known, who in self._known.items() if known != key}
            self._known = {**others, key: holders} if holders else others
        for changed in self._heeding:
            changed()
        return holders

    def refresh(self, number: int) -> None:
        """Asks again whose the known keys are once `number`, of revocations, has changed, and
        forgets whose they are no more; also when very many are known, of which most have gone.
        While Redis is silent nothing is forgotten, and the next call tries again.
        """
        with self._lock:
            if number == self._number and len(self._known) <= self._most:
                return
            keys = list(self._known)
            found: list[Holders] = []
            try:
                for at in range(0, len(keys), ASKED):
                    found += self._whose(keys[at : at + ASKED])
            except StateUnavailable:
                return
            self._known = {key: who for key, who in zip(keys, found, strict=True) if who}
            self._number, self._most = number, max(KNOWN, 2 * len(self._known))
        for changed in self._heeding:
            changed()

    def heed(self, changed: Callable[[], None]) -> None:
        """`changed` runs after each `refresh` and `ask_again` that asked."""
        self._heeding.append(changed)


def _without_key(address: str) -> WrongKeys:
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
        gateway: bytes,
        holder: Callable[[bytes], str | None] = lambda public: None,
    ) -> None:
        """`gateway`: its public key. `holder`: the id of the good token with a public key."""
        self.own, self._gateway, self._holder = own, gateway, holder

    def asked(self, address: str) -> bytes:
        """The gateway's key: it is called, and calls nobody."""
        return self._gateway

    def published(self, endpoint: str) -> str:
        """The endpoint: whoever may call knows the key."""
        return endpoint

    def role_of(self, public: bytes) -> str | None:
        """The id of a token; None: nobody is let in with this key."""
        return self._holder(public)

    def user_of(self, public: bytes, role: str) -> str:
        """The role itself."""
        return role

    def role_now(self, user: str) -> str:
        """As it was when it came in."""
        return user

    def heed(self, changed: Callable[[], None]) -> None:
        """No answer changes."""
