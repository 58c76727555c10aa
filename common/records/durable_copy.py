"""A durable copy of a mesh's jobs, at a URL of any kind that fsspec knows: what another host goes
on from when the head and its disk are gone.

    owner.json                           whose copy it is, until another mesh takes it over
    jobs/JOB/job.json                    the job, with its bundle's list of files
    jobs/JOB/standing.json               its phase and lineage, and what of it is there
    jobs/JOB/checkpoints/NAME.json       a checkpoint's manifest, written when its files are there
    jobs/JOB/files/DIGEST                files of the bundle and the checkpoints
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from meshrl.common.base.digest import DIGITS, digest_of_file
from meshrl.common.base.errors import Damaged, MeshError, NotFound
from meshrl.common.base.files import documents
from meshrl.common.base.files.at_url import AtUrl
from meshrl.common.base.files.sealed import sealed, unsealed

FILE = "durable.json"  # in the mesh's directory: which copy is its own
OWNER = "owner.json"
ASKED_EACH = 10  # files that are removed between two looks whether the copy is still ours


@dataclass(frozen=True)
class Durable:
    """Where a mesh keeps its copy, and by which word it knows that it is its own."""

    url: str = field(repr=False)  # may hold a secret
    owner: str = field(repr=False)

    @classmethod
    def of(cls, directory: Path) -> Durable | None:
        """That of the mesh with this directory; None: it keeps no copy. Damaged."""
        path = directory / FILE
        try:
            return cls(**documents.decode(path.read_bytes(), str(path)))
        except FileNotFoundError:
            return None

    def write(self, directory: Path) -> None:
        """Puts it on record in the mesh's directory."""
        documents.write(directory / FILE, asdict(self))


class TakenOver(MeshError):
    """Another mesh goes on with what lies in a durable copy."""

    code = "taken_over"


class DurableCopy(AtUrl):
    """The copy at a URL."""

    def __init__(self, url: str, owner: str = "") -> None:
        """`owner`: on whose behalf it is written; what decides on what the next head goes on from
        is written and removed only while that is whose copy it is. ConfigError for a URL of a kind
        that is not known here.
        """
        super().__init__(url, "durable.url", "the durable copy")
        self._owner = owner

    # -- documents -------------------------------------------------------------------------------

    def read(self, name: str) -> dict[str, Any]:
        """A document; NotFound, Damaged."""
        return unsealed(self.content(name), Path(self.shown) / name)

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Puts a document in place of what is there. TakenOver."""
        self._still_ours()
        self.place_content(name, sealed(document))

    @property
    def owner(self) -> str:
        """Whose copy it is; empty: nobody's yet."""
        try:
            return str(self.read(OWNER)["owner"])
        except NotFound:
            return ""

    def claim(self) -> bool:
        """Makes the copy its writer's, if it is nobody's: whether it was. TakenOver."""
        if self.owner:
            self._still_ours()
            return False
        self.take_over()
        return True

    def take_over(self) -> None:
        """Makes the copy its writer's, whoever had it."""
        self.place_content(OWNER, sealed({"owner": self._owner}))

    def _still_ours(self) -> None:
        if (owner := self.owner) == self._owner:
            return
        if not owner:
            raise MeshError(
                "the copy has lost whose it is",
                where=f"{self.shown}/{OWNER}",
                fix="Nothing to do, if that was on purpose: all is copied again",
            )
        raise TakenOver(
            f"{self.shown} was taken over by another mesh: nothing is copied there any more",
            fix="The jobs go on there: cancel them here; or name another durable.url",
        )

    # -- jobs ------------------------------------------------------------------------------------

    def jobs(self) -> list[str]:
        """The jobs that it tells of."""
        return [unquote(name) for name in self.names("jobs")]

    def checkpoints(self, job: str) -> list[str]:
        """Names of a job's checkpoints, the newest first."""
        names = self.names(f"{of_job(job)}/checkpoints")
        whole = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return sorted(whole, reverse=True)

    def files(self, job: str) -> set[str]:
        """Digests of a job's files."""
        return {name for name in self.names(f"{of_job(job)}/files") if len(name) == DIGITS}

    def put(self, job: str, digest: str, path: Path) -> None:
        """Copies a file there."""
        self.place_file(f"{of_job(job)}/files/{digest}", path)

    def get(self, job: str, digest: str, path: Path) -> None:
        """Copies a file from there; NotFound, Damaged when it is not what its name says."""
        name = f"{of_job(job)}/files/{digest}"
        self.fetch_file(name, path)
        if digest_of_file(path) != digest:
            raise Damaged("it is not what its name says", where=f"{self.shown}/{name}")

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, if they are there. TakenOver."""
        for position, name in enumerate(names):
            if position % ASKED_EACH == 0:
                self._still_ours()
            self.discard(name)

    def remove_job(self, job: str) -> None:
        """Removes all of a job, at first what says that it is there. TakenOver."""
        self.remove([f"{of_job(job)}/job.json", of_job(job)])


def of_job(job: str) -> str:
    """The folder of a job."""
    return f"jobs/{quote(job, safe='')}"
