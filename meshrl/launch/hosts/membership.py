"""Membership of a host in its mesh, stored beside its settings.

The host has a key of its own, which the gateway knows while it is a member.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.files import documents
from meshrl.common.base.host.settings import generate_host_name
from meshrl.common.mesh.access.access_token import AccessToken
from meshrl.common.mesh.access.gateway_connection import GatewayConnection
from meshrl.common.mesh.transport.keys import KeyPair
from meshrl.directory.directory_paths import MeshPaths

REPAIR_HINT = (
    "Run `meshrl down` here, then join from a new directory with a token. Run `meshrl keys "
    "revoke` at the head to remove the former host"
)
CA_FILE_NAME = (
    "authority.pem"  # in the mesh's directory: the certificate that Redis' is signed with
)


_OLD_KEYS = {"gateway": "gateway_key", "invitation": "invitation_secret"}


@dataclass(frozen=True)
class Membership:
    """Membership of one host.

    `address` and `gateway_key`: where the mesh's gateway is reached, and its public key.
    `invitation_secret`:
    secret key of the token until the request is answered.
    """

    host: str
    address: str
    gateway_key: str
    secret: str = field(repr=False)  # key of its own, Z85
    invitation_secret: str = field(default="", repr=False)

    @classmethod
    def create(cls, token: AccessToken) -> Membership:
        secret = KeyPair.generate().secret.decode()
        return cls(generate_host_name(), token.address, token.gateway, secret, token.secret)

    @property
    def member_token(self) -> AccessToken:
        """Token by which the host sends requests to the gateway as a member."""
        return AccessToken(self.address, self.gateway_key, self.secret)

    @property
    def invitation_token(self) -> AccessToken:
        """Token by which the host requests membership."""
        return AccessToken(self.address, self.gateway_key, self.invitation_secret)

    @property
    def public_key(self) -> str:
        """Public half of the host's own key. Raises ConfigError."""
        try:
            return KeyPair.from_secret(self.secret.encode()).public.decode()
        except ValueError as error:
            raise ConfigError(f"this host's key is invalid: {error}", fix=REPAIR_HINT) from None

    def with_address(self, address: str) -> Membership:
        """Return a copy with another address of the gateway; unchanged for an empty address."""
        return replace(self, address=address) if address else self

    def write(self, mesh_paths: MeshPaths) -> None:
        """Write the membership, readable by this user alone."""
        documents.write(mesh_paths.membership, asdict(self))


@asynccontextmanager
async def connect_gateway(token: AccessToken) -> AsyncIterator[GatewayConnection]:
    """Open a connection to the gateway of a mesh for the duration of the block."""
    line = GatewayConnection(token)
    line.open()
    try:
        yield line
    finally:
        await line.close()


def read_membership(mesh_paths: MeshPaths) -> Membership | None:
    """Return the membership of the host with this directory; None if there is none.

    Raises CorruptData.
    """
    path = mesh_paths.membership
    try:
        return Membership(**documents.rename_keys(documents.read(path, REPAIR_HINT), _OLD_KEYS))
    except FileNotFoundError:
        return None
    except TypeError as error:
        raise documents.make_corrupt_error(
            path, f"it is not a valid membership: {error}", REPAIR_HINT
        ) from error


def delete_membership(mesh_paths: MeshPaths) -> None:
    own = (mesh_paths.settings, mesh_paths.membership, mesh_paths.shape, mesh_paths.leave_marker)
    for path in (*own, mesh_paths.directory / CA_FILE_NAME):
        path.unlink(missing_ok=True)
