"""Who a mesh's gateway is to those outside: an address and a key that stay when the mesh starts
again, so that tokens stay good.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files import documents
from meshrl.common.mesh.transport.keys import KeyPair

FILE = "gateway.json"  # in the mesh's directory
REPAIR = (
    "Put a copy of it back, or remove it and start the mesh again: the gateway has another key "
    "then, and tokens that were given are good no more"
)


@dataclass(frozen=True)
class Identity:
    """What the gateway was when it started last."""

    address: str  # as others reach it
    bound: str  # as it listened; the same again, if it can be had
    public: str
    secret: str = field(repr=False)

    @property
    def keys(self) -> KeyPair:
        """What it answers with."""
        return KeyPair(self.public.encode(), self.secret.encode())

    def write(self, directory: Path) -> None:
        """Puts it on record in the mesh's directory."""
        documents.write(directory / FILE, asdict(self))


def known(directory: Path) -> Identity | None:
    """That of the mesh with this directory; None before its first start. Damaged."""
    path = directory / FILE
    try:
        return Identity(**documents.read(path, REPAIR))
    except FileNotFoundError:
        return None
    except TypeError as error:
        raise documents.damaged(path, f"it is no gateway's: {error}", REPAIR) from error


def existing(directory: Path) -> Identity:
    """The same; NotFound when the mesh has never had a gateway."""
    found = known(directory)
    if found is None:
        raise NotFound(
            f"the mesh in {directory.parent} has no gateway",
            fix="`meshrl up` starts a mesh with one, unless --gateway is off",
        )
    return found
