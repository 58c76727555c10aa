"""Durable copy of a mesh's jobs at any URL that fsspec supports.

Another host continues from it when the head and its disk are lost.

    owner.json                           whose copy it is, until another mesh takes it over
    jobs/JOB/job.json                    the job, with its bundle's list of files
    jobs/JOB/standing.json               its phase and lineage, and the copied checkpoint
    jobs/JOB/checkpoints/NAME.json       a checkpoint's manifest, written after its files
    jobs/JOB/files/DIGEST                files of the bundle and the checkpoints
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from meshrl.common.base.digest import DIGEST_DIGITS, compute_file_digest
from meshrl.common.base.errors import CorruptData, MeshError, NotFound
from meshrl.common.base.files import documents
from meshrl.common.base.files.remote_directory import RemoteDirectory
from meshrl.common.base.files.sealed_documents import decode_sealed, encode_sealed

RECORD_FILE = "durable.json"  # in the mesh's directory: the copy of this mesh
OWNER_FILE = "owner.json"
OWNER_CHECK_INTERVAL_FILES = 10  # removals between two checks of the owner


@dataclass(frozen=True)
class DurableCopyRecord:
    """URL of a mesh's copy, and the owner key that identifies it as this mesh's."""

    url: str = field(repr=False)  # may hold a secret
    owner: str = field(repr=False)

    @classmethod
    def read_from(cls, directory: Path) -> DurableCopyRecord | None:
        """Read the record in a mesh's directory; None: the mesh has no copy. CorruptData."""
        path = directory / RECORD_FILE
        try:
            return cls(**documents.decode(path.read_bytes(), str(path)))
        except FileNotFoundError:
            return None

    def write(self, directory: Path) -> None:
        """Write the record to the mesh's directory."""
        documents.write(directory / RECORD_FILE, asdict(self))


class CopyTakenOver(MeshError):
    """Another mesh has taken over a durable copy."""

    code = "taken_over"


class DurableCopy(RemoteDirectory):
    """Copy at a URL."""

    def __init__(self, url: str, owner: str = "") -> None:
        """Open the copy.

        Args:
            owner: Key of the writing mesh. Documents are written and removed only while the copy
                has this
                owner.
        Raises:
            ConfigError: The kind of URL is unknown here.
        """
        super().__init__(url, "durable.url", "the durable copy")
        self._owner = owner

    # -- documents -------------------------------------------------------------------------------

    def read_document(self, name: str) -> dict[str, Any]:
        """Return a document. NotFound: it is missing. CorruptData: it is corrupt."""
        return decode_sealed(self.read_file(name), Path(self.public_url) / name)

    def write_document(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a document, replacing any existing one. CopyTakenOver: another mesh owns the
        copy.
        """
        self._check_owner()
        self.write_file(name, encode_sealed(document))

    @property
    def current_owner(self) -> str:
        """Owner key of the copy; empty if it has no owner."""
        try:
            return str(self.read_document(OWNER_FILE)["owner"])
        except NotFound:
            return ""

    def claim(self) -> bool:
        """Make the copy this mesh's if it has no owner, and return True then. CopyTakenOver."""
        if self.current_owner:
            self._check_owner()
            return False
        self.take_over()
        return True

    def take_over(self) -> None:
        """Make the copy this mesh's, replacing any other owner."""
        self.write_file(OWNER_FILE, encode_sealed({"owner": self._owner}))

    def _check_owner(self) -> None:
        if (owner := self.current_owner) == self._owner:
            return
        if not owner:
            raise MeshError(
                "the copy has lost its owner record",
                where=f"{self.public_url}/{OWNER_FILE}",
                fix="No action is needed if this was intended: all files are copied again",
            )
        raise CopyTakenOver(
            f"another mesh has taken over {self.public_url}: copying has stopped",
            fix="Cancel the jobs here: they continue there. Or set another durable.url",
        )

    # -- jobs ------------------------------------------------------------------------------------

    def list_jobs(self) -> list[str]:
        """Return the ids of the jobs in the copy."""
        return [unquote(name) for name in self.list_names("jobs")]

    def list_checkpoints(self, job: str) -> list[str]:
        """Return the names of a job's checkpoints, newest first."""
        names = self.list_names(f"{job_folder(job)}/checkpoints")
        complete = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return sorted(complete, reverse=True)

    def list_file_digests(self, job: str) -> set[str]:
        """Return the digests of a job's files."""
        return {
            name
            for name in self.list_names(f"{job_folder(job)}/files")
            if len(name) == DIGEST_DIGITS
        }

    def upload(self, job: str, digest: str, path: Path) -> None:
        """Upload a file."""
        self.upload_file(f"{job_folder(job)}/files/{digest}", path)

    def download(self, job: str, digest: str, path: Path) -> None:
        """Download a file. NotFound: it is missing. CorruptData: it does not have its digest."""
        name = f"{job_folder(job)}/files/{digest}"
        self.fetch_file(name, path)
        if compute_file_digest(path) != digest:
            raise CorruptData(
                "its content does not match its name", where=f"{self.public_url}/{name}"
            )

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove files that exist. CopyTakenOver: another mesh owns the copy."""
        for position, name in enumerate(names):
            if position % OWNER_CHECK_INTERVAL_FILES == 0:
                self._check_owner()
            self.remove(name)

    def remove_job(self, job: str) -> None:
        """Remove everything of a job, first the document that marks it as present.
        CopyTakenOver.
        """
        self.remove_files([f"{job_folder(job)}/job.json", job_folder(job)])


def job_folder(job: str) -> str:
    """Return the folder of a job."""
    return f"jobs/{quote(job, safe='')}"
