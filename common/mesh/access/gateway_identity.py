"""Who a mesh's gateway is to those outside: an address and a key that stay when the mesh starts
again, so that tokens stay good.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files import documents
from meshrl.common.mesh.transport.keys import KeyPair

IDENTITY_FILE = "gateway.json"  # in the mesh's directory
REPAIR_HINT = (
    "Put a copy of it back, or remove it and start the mesh again: the gateway has another key "
    "then, and tokens that were given are good no more"
)


@dataclass(frozen=True)
class GatewayIdentity:
    """What the gateway was when it started last."""

    address: str  # as others reach it
    bound: str  # as it listened; the same again, if it can be had
    public: str
    secret: str = field(repr=False)

    @property
    def key_pair(self) -> KeyPair:
        """What it answers with."""
        return KeyPair(self.public.encode(), self.secret.encode())

    def write(self, directory: Path) -> None:
        """Puts it on record in the mesh's directory."""
        documents.write(directory / IDENTITY_FILE, asdict(self))


def find_identity(directory: Path) -> GatewayIdentity | None:
    """That of the mesh with this directory; None before its first start. Damaged."""
    path = directory / IDENTITY_FILE
    try:
        return GatewayIdentity(**documents.read(path, REPAIR_HINT))
    except FileNotFoundError:
        return None
    except TypeError as error:
        raise documents.make_corrupt_error(
            path, f"it is no gateway's: {error}", REPAIR_HINT
        ) from error


def read_identity(directory: Path) -> GatewayIdentity:
    """The same; NotFound when the mesh has never had a gateway."""
    found = find_identity(directory)
    if found is None:
        raise NotFound(
            f"the mesh in {directory.parent} has no gateway",
            fix="`meshrl up` starts a mesh with one, unless --gateway is off",
        )
    return found
