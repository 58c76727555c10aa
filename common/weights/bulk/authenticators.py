"""Authentication at bulk ports: the credentials of a process as server and as client."""

from __future__ import annotations

from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from meshrl.common.api.transfer.bulk_permissions import BULK_PERMISSIONS
from meshrl.common.base.errors import NotAllowed
from meshrl.common.mesh.transport.address import format_bulk_key
from meshrl.common.mesh.transport.keys import ProcessKeys
from meshrl.common.weights.handshakes.handshake import ClientHandshake, ServerHandshake


class BulkAuthenticator(Protocol):
    """Authentication of both ends of a connection."""

    def begin_client_handshake(self, address: str, endpoint: str) -> ClientHandshake:
        """Return the client's handshake for one connection to the bulk port at `endpoint`.

        Args:
            address: Address of the serving process, with its key.
        Raises:
            WrongKeys: The address names no key.
        """

    def begin_server_handshake(self, endpoint: str) -> ServerHandshake:
        """Return the server's handshake for one connection to this process's port at `endpoint`."""

    def identify_user(self, public_key: bytes) -> str | None:
        """Return the user for `check_allowed` by public key; None: no known process has the key.

        It may wait for Redis; StateUnavailable.
        """

    def check_allowed(self, user: str, operation: str) -> None:
        """Raise NotAllowed unless the user may do `operation` now; never waits.

        Args:
            operation: An operation of `meshrl.common.api.transfer.bulk_permissions`.
        """


class KeyAuthenticator:
    """Authentication by process keys; a table of permissions by role decides about operations."""

    def __init__(self, keys: ProcessKeys, server_role: str, sealed: bool) -> None:
        """Create the authenticator.

        Args:
            server_role: Role of the serving process.
            sealed: Require encryption after the handshake.
        """
        self._keys, self._server_role, self._sealed = keys, server_role, sealed

    def begin_client_handshake(self, address: str, endpoint: str) -> ClientHandshake:
        """Return the client's handshake with the process whose key is in the address."""
        server = self._keys.find_expected_bulk_key(address)
        return ClientHandshake(self._keys.bulk_private_key, server, endpoint, self._sealed)

    def begin_server_handshake(self, endpoint: str) -> ServerHandshake:
        """Return the server's handshake with this process's own key."""
        return ServerHandshake(self._keys.bulk_private_key, endpoint, self._sealed)

    def identify_user(self, public_key: bytes) -> str | None:
        """Return the key if an admitted process has registered it beside its CURVE key, else
        None.
        """
        key = format_bulk_key(public_key)
        return key if self._keys.find_holders(key) else None

    def check_allowed(self, user: str, operation: str) -> None:
        """Raise NotAllowed unless the key's current roles permit the operation; revocations count
        at once.
        """
        role = self._keys.find_current_roles(user)
        if BULK_PERMISSIONS.get((self._server_role, operation), frozenset()).isdisjoint(
            role.split()
        ):
            raise NotAllowed(
                f"a process of role {role} may not {operation} chunks of {self._server_role}"
                if role
                else "this key is no longer admitted",
                where=self._server_role,
                fix=(
                    "See common/api/transfer/bulk_permissions.py for the permitted roles; run "
                    "`meshrl keys` to list the admitted keys"
                ),
            )


class InProcessAuthenticator:
    """Authentication between meshes of one interpreter, as in a simulation: they share one key
    pair.
    """

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
