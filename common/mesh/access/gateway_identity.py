"""Identity of a mesh's gateway for outside callers: an address and a key that survive restarts.

Tokens stay valid because both stay the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files import documents
from meshrl.common.mesh.transport.keys import KeyPair

IDENTITY_FILE = "gateway.json"  # in the mesh's directory
REPAIR_HINT = (
    "Restore a copy of it, or remove it and restart the mesh. Without it the gateway gets a new "
    "key, and all issued tokens become invalid"
)


@dataclass(frozen=True)
class GatewayIdentity:
    """Identity of the gateway at its last start."""

    address: str  # address for callers
    bound: str  # endpoint of its listener, reused if it is free
    public: str
    secret: str = field(repr=False)

    @property
    def key_pair(self) -> KeyPair:
        """Key pair that the gateway authenticates with."""
        return KeyPair(self.public.encode(), self.secret.encode())

    def write(self, directory: Path) -> None:
        """Write the identity to the mesh's directory."""
        documents.write(directory / IDENTITY_FILE, asdict(self))


def find_identity(directory: Path) -> GatewayIdentity | None:
    """Read the identity in a mesh's directory; None before its first start. Raises CorruptData."""
    path = directory / IDENTITY_FILE
    try:
        return GatewayIdentity(**documents.read(path, REPAIR_HINT))
    except FileNotFoundError:
        return None
    except TypeError as error:
        raise documents.make_corrupt_error(
            path, f"it is not a gateway's identity: {error}", REPAIR_HINT
        ) from error


def read_identity(directory: Path) -> GatewayIdentity:
    """Read the identity in a mesh's directory; raise NotFound if the mesh never had a gateway."""
    found = find_identity(directory)
    if found is None:
        raise NotFound(
            f"the mesh in {directory.parent} has no gateway",
            fix="Start the mesh with `meshrl up`, without --gateway off",
        )
    return found
