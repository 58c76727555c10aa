"""Who is let in at a bulk port: the door of a process, which it also knocks with at those of
others.
"""

from __future__ import annotations

from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from meshrl.common.api.transfer.bulk import BULK
from meshrl.common.base.errors import NotAllowed
from meshrl.common.mesh.transport.address import bulk_key_text
from meshrl.common.mesh.transport.keys import ProcessKeys
from meshrl.common.weights.handshakes.handshake import ClientHandshake, ServerHandshake


class Door(Protocol):
    """What both ends of a connection prove themselves by."""

    def asking(self, address: str, place: str) -> ClientHandshake:
        """For one connection to the bulk port at `place` of the process at `address`. WrongKeys:
        that address names no key.
        """

    def answering(self, place: str) -> ServerHandshake:
        """For one connection to our own port, which is at `place`."""

    def user_of(self, public: bytes) -> str | None:
        """What `check` is to be told of who holds a public key; None: nobody who is let in.
        May wait for Redis; StateUnavailable.
        """

    def check(self, user: str, what: str) -> None:
        """NotAllowed unless that user may, now, do what `meshrl.common.api.transfer.bulk` calls
        `what`. Never waits.
        """


class KeyDoor:
    """Lets in by the keys of processes, to what the table allows their roles."""

    def __init__(self, keys: ProcessKeys, kind: str, sealed: bool) -> None:
        """`kind`: the role of who serves. `sealed`: whether what follows a proof has to be."""
        self._keys, self._kind, self._sealed = keys, kind, sealed

    def asking(self, address: str, place: str) -> ClientHandshake:
        """For who has the key in the address."""
        server = self._keys.bulk_asked(address)
        return ClientHandshake(self._keys.bulk, server, place, self._sealed)

    def answering(self, place: str) -> ServerHandshake:
        """With this process's own key."""
        return ServerHandshake(self._keys.bulk, place, self._sealed)

    def user_of(self, public: bytes) -> str | None:
        """The key, if a process that is let in has registered it with its other one."""
        key = bulk_key_text(public)
        return key if self._keys.holders_of(key) else None

    def check(self, user: str, what: str) -> None:
        """Revocations count at once."""
        role = self._keys.role_now(user)
        if BULK.get((self._kind, what), frozenset()).isdisjoint(role.split()):
            raise NotAllowed(
                f"a process of role {role} may not {what} chunks of {self._kind}"
                if role
                else "this key is not let in any more",
                where=self._kind,
                fix="common/api/transfer/bulk.py says who may, `meshrl keys` whose keys are let in",
            )


class InterpreterDoor:
    """Door between meshes of one interpreter, as those of a simulation: they share one key pair."""

    _pair = X25519PrivateKey.generate()

    def __init__(self, sealed: bool = False) -> None:
        self._public, self._sealed = self._pair.public_key().public_bytes_raw(), sealed

    def asking(self, address: str, place: str) -> ClientHandshake:
        """Return the client's handshake with another mesh of this interpreter."""
        return ClientHandshake(self._pair, self._public, place, self._sealed)

    def answering(self, place: str) -> ServerHandshake:
        """Return the server's handshake."""
        return ServerHandshake(self._pair, place, self._sealed)

    def user_of(self, public: bytes) -> str | None:
        """Return the shared key's name; None for any other key."""
        return bulk_key_text(public) if public == self._public else None

    def check(self, user: str, what: str) -> None:
        """Allow everything to holders of the shared key."""
