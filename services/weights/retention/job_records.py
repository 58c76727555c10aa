"""Store's records of each job, in files beside the chunks.

They outlive a loss of Redis, because they list what a job would resume from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from meshrl.common.base.errors import CorruptData
from meshrl.common.base.files import corruption, documents
from meshrl.common.base.files.disk_sync import fsync_path
from meshrl.common.base.files.sealed_documents import encode_sealed, read_sealed
from meshrl.common.mesh.process.host import Host
from meshrl.common.weights.chunks.chunk_store import make_write_error
from meshrl.services.weights.retention.pins import VersionPin
from meshrl.services.weights.retention.policy import VersionNumber

JOBS_FOLDER = "jobs"  # in the store's directory
IO_TIMEOUT_S = 30.0  # of one file operation


NO_COMMIT = VersionNumber(-1, -1)


@dataclass
class JobRecord:
    job: str
    run_dir: str = ""  # empty before the first checkpoint
    versions: dict[str, VersionNumber] = field(default_factory=dict)  # by manifest
    # The newest commit that the store has seen; it outlives a rollback of Redis.
    newest: VersionNumber = NO_COMMIT
    newest_manifest: str = ""
    # Versions that deltas for hosts with older versions are based on, at the last sweep.
    anchors: frozenset[str] = frozenset()
    # False: the record was corrupt, and Redis has not supplied the job yet.
    is_known: bool = True

    def record_commit(self, number: VersionNumber, manifest: str) -> None:
        """Record a commit from the job's row in Redis; an older one is ignored."""
        if number > self.newest and manifest:
            self.newest, self.newest_manifest = number, manifest

    def find_conflict(self, number: VersionNumber, manifest: str) -> str:
        """Return the other manifest on record for a committed version, empty if there is none.

        A version that was only staged may be staged again, after its trainer restarted.
        """
        if number == self.newest:
            return "" if manifest == self.newest_manifest else self.newest_manifest
        if number.lineage != self.newest.lineage or number > self.newest:
            return ""
        others = [digest for digest, one in self.versions.items() if one == number]
        return "" if manifest in others else next(iter(others), "")


@dataclass(frozen=True)
class CorruptRecord:
    job: str
    path: Path
    reason: str
    quarantined_path: Path


class JobRecords:
    """Records of jobs, one atomically written file each."""

    def __init__(self, host: Host, directory: Path) -> None:
        self._host, self._directory = host, directory
        self._records: dict[str, JobRecord] = {}
        self._write_lock = asyncio.Lock()

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(list(self._records.values()))

    def get_or_create(self, job: str) -> JobRecord:
        return self._records.setdefault(job, JobRecord(job))

    async def load(self) -> list[CorruptRecord]:
        """Read the records of earlier starts; quarantine and return corrupt ones.

        The job of a corrupt record has `is_known` False until Redis supplies it, also after another
        start.
        """
        found, lost = await self._host.run_blocking(self._read_files, deadline_s=IO_TIMEOUT_S)
        self._records = {record.job: record for record in found}
        for one in lost:
            self._records[one.job] = JobRecord(one.job, is_known=False)
        return lost

    async def merge_from_redis(
        self, job: str, run_dir: str, versions: dict[str, VersionNumber]
    ) -> None:
        """Add what Redis has of a job: a record may be corrupt, lost or outdated."""
        record = self.get_or_create(job)
        merged = versions | record.versions
        if (record.run_dir, record.versions, record.is_known) != (run_dir, merged, True):
            record.run_dir, record.versions, record.is_known = run_dir, merged, True
            await self.save(job)

    async def add_pinned(self, job: str, run_dir: str, pins: Mapping[str, VersionPin]) -> None:
        """Add pinned versions of a run that were already removed from the record."""
        versions = self.get_or_create(job).versions
        fresh = {m: pin for m, pin in pins.items() if m not in versions and pin.run == run_dir}
        if fresh:
            versions |= {m: VersionNumber(pin.lineage, pin.version) for m, pin in fresh.items()}
            await self.save(job)

    @property
    def has_unknown_jobs(self) -> bool:
        """True if the needs of some job are unknown."""
        return any(not record.is_known for record in self._records.values())

    async def save(self, job: str) -> None:
        async with self._write_lock:
            path, content = (
                _record_path(self._directory, job),
                _encode_record(self.get_or_create(job)),
            )
            await self._host.run_blocking(self._write, path, content, deadline_s=IO_TIMEOUT_S)

    async def forget(self, job: str) -> None:
        async with self._write_lock:
            self._records.pop(job, None)
            path = _record_path(self._directory, job)
            await self._host.run_blocking(path.unlink, True, deadline_s=IO_TIMEOUT_S)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            self._host.replace_file(path, content)
        except OSError as error:
            raise make_write_error(error, path) from error

    def _read_files(self) -> tuple[list[JobRecord], list[CorruptRecord]]:
        self._directory.mkdir(parents=True, exist_ok=True)
        fsync_path(self._directory.parent)
        for half in self._directory.glob(".*"):  # left by a store that was killed while writing
            half.unlink(missing_ok=True)
        for unknown in self._directory.glob("*.unknown"):  # left by an interrupted start
            if not unknown.with_suffix(".json").exists():
                unknown.rename(unknown.with_suffix(".json"))
        found: list[JobRecord] = []
        lost: list[CorruptRecord] = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                found.append(read_record(path))
            except CorruptData as error:
                # The record that marks the job as unknown is durable before the corrupt one is
                # moved:
                # StorageFull leaves the corrupt one in its place, for the next start.
                job, unknown = unquote(path.stem), path.with_suffix(".unknown")
                self._write(unknown, _encode_record(JobRecord(job, is_known=False)))
                quarantined_path = corruption.quarantine(path, self._directory.parent)
                unknown.rename(path)
                fsync_path(path.parent)
                lost.append(CorruptRecord(job, path, error.message, quarantined_path))
        return found, lost


def write_record(path: Path, record: JobRecord) -> None:
    documents.write_bytes(path, _encode_record(record))


def record_path(store: Path, job: str) -> Path:
    return _record_path(store / JOBS_FOLDER, job)


def _record_path(directory: Path, job: str) -> Path:
    return directory / f"{quote(job, safe='')}.json"


def _encode_record(record: JobRecord) -> bytes:
    versions = {m: [number.lineage, number.version] for m, number in record.versions.items()}
    newest = [record.newest.lineage, record.newest.version, record.newest_manifest]
    version_fields = {"versions": versions, "newest": newest, "anchors": sorted(record.anchors)}
    return encode_sealed(
        {"job": record.job, "run_dir": record.run_dir, **version_fields, "known": record.is_known}
    )


def read_record(path: Path) -> JobRecord:
    """Read the record in a file. NotFound, CorruptData."""
    found = read_sealed(path)
    try:
        versions = {digest: VersionNumber(*number) for digest, number in found["versions"].items()}
        lineage, version, manifest = found["newest"]
        about = (
            versions,
            VersionNumber(lineage, version),
            manifest,
            frozenset(found.get("anchors", ())),
        )
        record = JobRecord(found["job"], found["run_dir"], *about, found["known"])
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CorruptData(f"the file is not a job record: {error!r}", where=str(path)) from error
    if record.job != unquote(path.stem):
        raise CorruptData(f"the record belongs to {record.job}", where=str(path))
    return record
