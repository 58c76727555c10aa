"""Who is let in at a bulk port: the door of a process, which it also knocks with at those of
others.
"""

from __future__ import annotations

from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from meshrl.common.api.transfer.bulk_permissions import BULK_PERMISSIONS
from meshrl.common.base.errors import NotAllowed
from meshrl.common.mesh.transport.address import format_bulk_key
from meshrl.common.mesh.transport.keys import ProcessKeys
from meshrl.common.weights.handshakes.handshake import ClientHandshake, ServerHandshake


class BulkAuthenticator(Protocol):
    """What both ends of a connection prove themselves by."""

    def begin_client_handshake(self, address: str, endpoint: str) -> ClientHandshake:
        """For one connection to the bulk port at `endpoint` of the process at `address`. WrongKeys:
        that address names no key.
        """

    def begin_server_handshake(self, endpoint: str) -> ServerHandshake:
        """For one connection to our own port, which is at `endpoint`."""

    def identify_user(self, public_key: bytes) -> str | None:
        """What `check` is to be told of who holds a public key; None: nobody who is let in.
        May wait for Redis; StateUnavailable.
        """

    def check_allowed(self, user: str, operation: str) -> None:
        """NotAllowed unless that user may, now, do what
        `meshrl.common.api.transfer.bulk_permissions` calls
        `operation`. Never waits.
        """


class KeyAuthenticator:
    """Lets in by the keys of processes, to what the table allows their roles."""

    def __init__(self, keys: ProcessKeys, server_role: str, sealed: bool) -> None:
        """`server_role`: of who serves. `sealed`: whether what follows a proof has to be."""
        self._keys, self._server_role, self._sealed = keys, server_role, sealed

    def begin_client_handshake(self, address: str, endpoint: str) -> ClientHandshake:
        """For who has the key in the address."""
        server = self._keys.find_expected_bulk_key(address)
        return ClientHandshake(self._keys.bulk_private_key, server, endpoint, self._sealed)

    def begin_server_handshake(self, endpoint: str) -> ServerHandshake:
        """With this process's own key."""
        return ServerHandshake(self._keys.bulk_private_key, endpoint, self._sealed)

    def identify_user(self, public_key: bytes) -> str | None:
        """The key, if a process that is let in has registered it with its other one."""
        key = format_bulk_key(public_key)
        return key if self._keys.find_holders(key) else None

    def check_allowed(self, user: str, operation: str) -> None:
        """Revocations count at once."""
        role = self._keys.find_current_roles(user)
        if BULK_PERMISSIONS.get((self._server_role, operation), frozenset()).isdisjoint(
            role.split()
        ):
            raise NotAllowed(
                f"a process of role {role} may not {operation} chunks of {self._server_role}"
                if role
                else "this key is not let in any more",
                where=self._server_role,
                fix=(
                    "common/api/transfer/bulk_permissions.py says who may, `meshrl keys` whose "
                    "keys are let in"
                ),
            )


class InProcessAuthenticator:
    """Door between meshes of one interpreter, as those of a simulation: they share one key pair."""

    _key_pair = X25519PrivateKey.generate()

    def __init__(self, sealed: bool = False) -> None:
        self._public_key, self._sealed = self._key_pair.public_key().public_bytes_raw(), sealed

    def begin_client_handshake(self, address: str, endpoint: str) -> ClientHandshake:
        """Return the client's handshake with another mesh of this interpreter."""
        return ClientHandshake(self._key_pair, self._public_key, endpoint, self._sealed)

    def begin_server_handshake(self, endpoint: str) -> ServerHandshake:
        """Return the server's handshake."""
        return ServerHandshake(self._key_pair, endpoint, self._sealed)

    def identify_user(self, public_key: bytes) -> str | None:
        """Return the shared key's name; None for any other key."""
        return format_bulk_key(public_key) if public_key == self._public_key else None

    def check_allowed(self, user: str, operation: str) -> None:
        """Allow everything to holders of the shared key."""
