"""The master secret of a mesh that hosts may join, in a file for the owner's eyes.

No process that the mesh starts is told where it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files import documents
from meshrl.common.base.host.settings import MeshSettings, refuse_shared

FILE = "owner.json"  # in the mesh's directory, of its head
REPAIR = (
    "Put a copy of it back, or `meshrl down`, remove it, and start the mesh again: it is made "
    "anew, with another name of the head"
)
PERSON = "person"  # the role of commands at the head


@dataclass(frozen=True)
class Owner:
    """Its master secret, of this start of the mesh, in hexadecimal digits, and the head's name,
    which stays.
    """

    secret: str = field(repr=False)
    host: str

    def write(self, directory: Path) -> None:
        """Puts it on record in the mesh's directory. StorageFull."""
        documents.write(directory / FILE, asdict(self))


def owner(directory: Path) -> Owner:
    """That of the mesh with this directory. NotFound on a host that has joined one, Damaged;
    ConfigError when others can read the file.
    """
    path = directory / FILE
    try:
        refuse_shared(path)
        return Owner(**documents.read(path, REPAIR))
    except FileNotFoundError:
        raise NotFound(
            "this host is not the head of its mesh, where the mesh's owner is known",
            where=str(directory),
            fix="Run the command at the head, where `meshrl up` was",
        ) from None
    except TypeError as error:
        raise documents.damaged(path, f"it holds no secret: {error}", REPAIR) from error


def person_settings(settings: MeshSettings, directory: Path) -> MeshSettings:
    """The settings by which a command at the head is a process of the mesh, of the role `person`:
    the mesh's own where roles have keys, and with the owner's secret where processes have. Raises
    what `owner` does.
    """
    return replace(settings, secret=owner(directory).secret) if settings.joinable else settings
