"""Master secret of a mesh that hosts may join, in a file that only its owner can read.

No process that the mesh starts receives the path of the file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files import documents
from meshrl.common.base.host.settings import MeshSettings, require_private_file

OWNER_FILE = "owner.json"  # in the mesh's directory, of its head
REPAIR_HINT = (
    "Restore a copy of it; or run `meshrl down`, remove it, and restart the mesh, which creates "
    "a new one with another name of the head"
)
PERSON_ROLE = "person"  # the role of commands at the head


@dataclass(frozen=True)
class MeshOwner:
    """Master secret of this start of the mesh, in hexadecimal digits, and the permanent name of the
    head.
    """

    secret: str = field(repr=False)
    host: str

    def write(self, directory: Path) -> None:
        """Write the secret to the mesh's directory. Raises StorageFull."""
        documents.write(directory / OWNER_FILE, asdict(self))


def read_owner(directory: Path) -> MeshOwner:
    """Read the secret in a mesh's directory.

    Raises NotFound on a host that has joined a mesh, CorruptData, and ConfigError if other users
    can read the file.
    """
    path = directory / OWNER_FILE
    try:
        require_private_file(path)
        return MeshOwner(**documents.read(path, REPAIR_HINT))
    except FileNotFoundError:
        raise NotFound(
            "this host is not the head of its mesh, and only the head has the owner's record",
            where=str(directory),
            fix="Run the command at the head, where `meshrl up` ran",
        ) from None
    except TypeError as error:
        raise documents.make_corrupt_error(
            path, f"it contains no secret: {error}", REPAIR_HINT
        ) from error


def make_person_settings(settings: MeshSettings, directory: Path) -> MeshSettings:
    """Return the settings that make a command at the head a process with the role `person`.

    These are the mesh's own settings where roles have keys. Where processes have keys, the owner's
    secret is added. Raises the errors of `read_owner`.
    """
    return replace(settings, secret=read_owner(directory).secret) if settings.joinable else settings
