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

from meshrl.common.base.digest import DIGEST_DIGITS, compute_file_digest
from meshrl.common.base.errors import CorruptData, MeshError, NotFound
from meshrl.common.base.files import documents
from meshrl.common.base.files.remote_directory import RemoteDirectory
from meshrl.common.base.files.sealed_documents import decode_sealed, encode_sealed

RECORD_FILE = "durable.json"  # in the mesh's directory: which copy is its own
OWNER_FILE = "owner.json"
OWNER_CHECK_INTERVAL_FILES = (
    10  # files that are removed between two looks whether the copy is still ours
)


@dataclass(frozen=True)
class DurableCopyRecord:
    """Where a mesh keeps its copy, and by which word it knows that it is its own."""

    url: str = field(repr=False)  # may hold a secret
    owner: str = field(repr=False)

    @classmethod
    def read_from(cls, directory: Path) -> DurableCopyRecord | None:
        """That of the mesh with this directory; None: it keeps no copy. Damaged."""
        path = directory / RECORD_FILE
        try:
            return cls(**documents.decode(path.read_bytes(), str(path)))
        except FileNotFoundError:
            return None

    def write(self, directory: Path) -> None:
        """Puts it on record in the mesh's directory."""
        documents.write(directory / RECORD_FILE, asdict(self))


class CopyTakenOver(MeshError):
    """Another mesh goes on with what lies in a durable copy."""

    code = "taken_over"


class DurableCopy(RemoteDirectory):
    """The copy at a URL."""

    def __init__(self, url: str, owner: str = "") -> None:
        """`owner`: on whose behalf it is written; what decides on what the next head goes on from
        is written and removed only while that is whose copy it is. ConfigError for a URL of a kind
        that is not known here.
        """
        super().__init__(url, "durable.url", "the durable copy")
        self._owner = owner

    # -- documents -------------------------------------------------------------------------------

    def read_document(self, name: str) -> dict[str, Any]:
        """A document; NotFound, Damaged."""
        return decode_sealed(self.read_file(name), Path(self.public_url) / name)

    def write_document(self, name: str, document: Mapping[str, Any]) -> None:
        """Puts a document in place of what is there. TakenOver."""
        self._check_owner()
        self.write_file(name, encode_sealed(document))

    @property
    def current_owner(self) -> str:
        """Whose copy it is; empty: nobody's yet."""
        try:
            return str(self.read_document(OWNER_FILE)["owner"])
        except NotFound:
            return ""

    def claim(self) -> bool:
        """Makes the copy its writer's, if it is nobody's: whether it was. TakenOver."""
        if self.current_owner:
            self._check_owner()
            return False
        self.take_over()
        return True

    def take_over(self) -> None:
        """Makes the copy its writer's, whoever had it."""
        self.write_file(OWNER_FILE, encode_sealed({"owner": self._owner}))

    def _check_owner(self) -> None:
        if (owner := self.current_owner) == self._owner:
            return
        if not owner:
            raise MeshError(
                "the copy has lost whose it is",
                where=f"{self.public_url}/{OWNER_FILE}",
                fix="Nothing to do, if that was on purpose: all is copied again",
            )
        raise CopyTakenOver(
            f"{self.public_url} was taken over by another mesh: nothing is copied there any more",
            fix="The jobs go on there: cancel them here; or name another durable.url",
        )

    # -- jobs ------------------------------------------------------------------------------------

    def list_jobs(self) -> list[str]:
        """The jobs that it tells of."""
        return [unquote(name) for name in self.list_names("jobs")]

    def list_checkpoints(self, job: str) -> list[str]:
        """Names of a job's checkpoints, the newest first."""
        names = self.list_names(f"{job_folder(job)}/checkpoints")
        whole = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return sorted(whole, reverse=True)

    def list_file_digests(self, job: str) -> set[str]:
        """Digests of a job's files."""
        return {
            name
            for name in self.list_names(f"{job_folder(job)}/files")
            if len(name) == DIGEST_DIGITS
        }

    def upload(self, job: str, digest: str, path: Path) -> None:
        """Copies a file there."""
        self.upload_file(f"{job_folder(job)}/files/{digest}", path)

    def download(self, job: str, digest: str, path: Path) -> None:
        """Copies a file from there; NotFound, Damaged when it is not what its name says."""
        name = f"{job_folder(job)}/files/{digest}"
        self.fetch_file(name, path)
        if compute_file_digest(path) != digest:
            raise CorruptData("it is not what its name says", where=f"{self.public_url}/{name}")

    def remove_files(self, names: Iterable[str]) -> None:
        """Removes files, if they are there. TakenOver."""
        for position, name in enumerate(names):
            if position % OWNER_CHECK_INTERVAL_FILES == 0:
                self._check_owner()
            self.remove(name)

    def remove_job(self, job: str) -> None:
        """Removes all of a job, at first what says that it is there. TakenOver."""
        self.remove_files([f"{job_folder(job)}/job.json", job_folder(job)])


def job_folder(job: str) -> str:
    """The folder of a job."""
    return f"jobs/{quote(job, safe='')}"
