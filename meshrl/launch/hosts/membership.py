"""What a host keeps of the mesh that it belongs to, beside its settings: a key of its own, by which
the gateway knows it for as long as it is a member.
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
    "`meshrl down` here, then join from a new directory with a token; `meshrl keys revoke` at "
    "the head makes it forget what this host was"
)
CA_FILE_NAME = (
    "authority.pem"  # in the mesh's directory: the certificate that Redis' is signed with
)


@dataclass(frozen=True)
class Membership:
    """One host's. `address` and `gateway` are where the mesh's gateway is reached, and the key that
    it answers with; `invitation` is the secret key of the token while it has not been answered.
    """

    host: str
    address: str
    gateway: str
    secret: str = field(repr=False)  # key of its own, Z85
    invitation: str = field(default="", repr=False)

    @classmethod
    def create(cls, token: AccessToken) -> Membership:
        secret = KeyPair.generate().secret.decode()
        return cls(generate_host_name(), token.address, token.gateway, secret, token.secret)

    @property
    def member_token(self) -> AccessToken:
        """By which it asks the gateway as a member."""
        return AccessToken(self.address, self.gateway, self.secret)

    @property
    def invitation_token(self) -> AccessToken:
        """By which it asks to become one."""
        return AccessToken(self.address, self.gateway, self.invitation)

    @property
    def public_key(self) -> str:
        """The public half of its own key. ConfigError."""
        try:
            return KeyPair.from_secret(self.secret.encode()).public.decode()
        except ValueError as error:
            raise ConfigError(f"this host's own key is none: {error}", fix=REPAIR_HINT) from None

    def with_address(self, address: str) -> Membership:
        """The same, of a gateway that is reached elsewhere; nowhere else for an empty address."""
        return replace(self, address=address) if address else self

    def write(self, mesh_paths: MeshPaths) -> None:
        """For this user's eyes alone."""
        documents.write(mesh_paths.membership, asdict(self))


@asynccontextmanager
async def connect_gateway(token: AccessToken) -> AsyncIterator[GatewayConnection]:
    """A line to the gateway of a mesh, which is open in the block."""
    line = GatewayConnection(token)
    line.open()
    try:
        yield line
    finally:
        await line.close()


def read_membership(mesh_paths: MeshPaths) -> Membership | None:
    """That of the host with this directory; None when it has none. Damaged."""
    path = mesh_paths.membership
    try:
        return Membership(**documents.read(path, REPAIR_HINT))
    except FileNotFoundError:
        return None
    except TypeError as error:
        raise documents.make_corrupt_error(
            path, f"it is no membership: {error}", REPAIR_HINT
        ) from error


def delete_membership(mesh_paths: MeshPaths) -> None:
    own = (mesh_paths.settings, mesh_paths.membership, mesh_paths.shape, mesh_paths.leave_marker)
    for path in (*own, mesh_paths.directory / CA_FILE_NAME):
        path.unlink(missing_ok=True)
