"""What a host keeps of the mesh that it belongs to, beside its settings: a key of its own, by which
the gateway knows it for as long as it is a member.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.files import documents
from meshrl.common.base.host.settings import new_host
from meshrl.common.mesh.access.line import Line
from meshrl.common.mesh.access.ticket import Ticket
from meshrl.common.mesh.transport.keys import KeyPair
from meshrl.directory.places import MeshPlace

REPAIR = (
    "`meshrl down` here, then join from a new directory with a token; `meshrl keys revoke` at "
    "the head makes it forget what this host was"
)
AUTHORITY = "authority.pem"  # in the mesh's directory: the certificate that Redis' is signed with


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
    def new(cls, token: Ticket) -> Membership:
        secret = KeyPair.new().secret.decode()
        return cls(new_host(), token.address, token.gateway, secret, token.secret)

    @property
    def ticket(self) -> Ticket:
        """By which it asks the gateway as a member."""
        return Ticket(self.address, self.gateway, self.secret)

    @property
    def token(self) -> Ticket:
        """By which it asks to become one."""
        return Ticket(self.address, self.gateway, self.invitation)

    @property
    def public(self) -> str:
        """The public half of its own key. ConfigError."""
        try:
            return KeyPair.of(self.secret.encode()).public.decode()
        except ValueError as error:
            raise ConfigError(f"this host's own key is none: {error}", fix=REPAIR) from None

    def at(self, address: str) -> Membership:
        """The same, of a gateway that is reached elsewhere; nowhere else for an empty address."""
        return replace(self, address=address) if address else self

    def write(self, place: MeshPlace) -> None:
        """For this user's eyes alone."""
        documents.write(place.membership, asdict(self))


@asynccontextmanager
async def gateway_line(ticket: Ticket) -> AsyncIterator[Line]:
    """A line to the gateway of a mesh, which is open in the block."""
    line = Line(ticket)
    line.open()
    try:
        yield line
    finally:
        await line.close()


def known(place: MeshPlace) -> Membership | None:
    """That of the host with this directory; None when it has none. Damaged."""
    path = place.membership
    try:
        return Membership(**documents.read(path, REPAIR))
    except FileNotFoundError:
        return None
    except TypeError as error:
        raise documents.damaged(path, f"it is no membership: {error}", REPAIR) from error


def forget(place: MeshPlace) -> None:
    own = (place.settings, place.membership, place.shape, place.leaving)
    for path in (*own, place.directory / AUTHORITY):
        path.unlink(missing_ok=True)
