"""The store's records for each job, in files beside the chunks: Redis may lose all it has, and what
a job would go on from must outlive that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from meshrl.common.base.errors import Damaged
from meshrl.common.base.files import damage, documents
from meshrl.common.base.files.durable import sync
from meshrl.common.base.files.sealed import read_sealed, sealed
from meshrl.common.mesh.process.host import Host
from meshrl.common.weights.chunks.chunks import failure
from meshrl.services.weights.keeping.pins import Pin
from meshrl.services.weights.keeping.retention import Number

JOBS = "jobs"  # in the store's directory
IO_S = 30.0  # deadline of one file operation


NO_COMMIT = Number(-1, -1)


@dataclass
class JobVersions:
    job: str
    run_dir: str = ""  # empty before the first checkpoint
    versions: dict[str, Number] = field(default_factory=dict)  # by manifest, of all that are kept
    # The newest commit that the store has seen, which outlives a Redis that goes back.
    newest: Number = NO_COMMIT
    newest_manifest: str = ""
    # Those of them that deltas are made from for hosts behind the others, at the last sweep.
    anchors: frozenset[str] = frozenset()
    # False: what was on record is damaged, and Redis has not told of the job yet.
    known: bool = True

    def saw_commit(self, number: Number, manifest: str) -> None:
        """A job's row in Redis says so; an older one than before says nothing."""
        if number > self.newest and manifest:
            self.newest, self.newest_manifest = number, manifest

    def conflict(self, number: Number, manifest: str) -> str:
        """The other manifest that is on record for a version that has been committed; empty when
        there is none. What was only staged may be staged anew: its trainer has started again.
        """
        if number == self.newest:
            return "" if manifest == self.newest_manifest else self.newest_manifest
        if number.lineage != self.newest.lineage or number > self.newest:
            return ""
        others = [digest for digest, one in self.versions.items() if one == number]
        return "" if manifest in others else next(iter(others), "")


@dataclass(frozen=True)
class Lost:
    job: str
    path: Path
    why: str
    aside: Path


class JobRecords:
    """One file for each job, written whole."""

    def __init__(self, host: Host, directory: Path) -> None:
        self._host, self._directory = host, directory
        self._records: dict[str, JobVersions] = {}
        self._writing = asyncio.Lock()

    def __iter__(self) -> Iterator[JobVersions]:
        return iter(list(self._records.values()))

    def of(self, job: str) -> JobVersions:
        return self._records.setdefault(job, JobVersions(job))

    async def open(self) -> list[Lost]:
        """Reads what an earlier start wrote. What is damaged is set aside and returned: that job
        is not `known` until it is made known again, also by another start.
        """
        found, lost = await self._host.run_blocking(self._read, deadline_s=IO_S)
        self._records = {record.job: record for record in found}
        for one in lost:
            self._records[one.job] = JobVersions(one.job, known=False)
        return lost

    async def make_known(self, job: str, run_dir: str, versions: dict[str, Number]) -> None:
        """Adds what Redis tells of a job: a record may be damaged, gone or older than it was."""
        record = self.of(job)
        told = versions | record.versions
        if (record.run_dir, record.versions, record.known) != (run_dir, told, True):
            record.run_dir, record.versions, record.known = run_dir, told, True
            await self.save(job)

    async def take_up(self, job: str, run_dir: str, pins: Mapping[str, Pin]) -> None:
        """Adds versions of a run that were pinned when they had been struck off already."""
        versions = self.of(job).versions
        fresh = {m: pin for m, pin in pins.items() if m not in versions and pin.run == run_dir}
        if fresh:
            versions |= {m: Number(pin.lineage, pin.version) for m, pin in fresh.items()}
            await self.save(job)

    @property
    def unknown(self) -> bool:
        """Whether there is a job of which nobody can tell what it needs."""
        return any(not record.known for record in self._records.values())

    async def save(self, job: str) -> None:
        async with self._writing:
            path, content = _file(self._directory, job), _content(self.of(job))
            await self._host.run_blocking(self._write, path, content, deadline_s=IO_S)

    async def forget(self, job: str) -> None:
        async with self._writing:
            self._records.pop(job, None)
            path = _file(self._directory, job)
            await self._host.run_blocking(path.unlink, True, deadline_s=IO_S)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            self._host.replace_file(path, content)
        except OSError as error:
            raise failure(error, path) from error

    def _read(self) -> tuple[list[JobVersions], list[Lost]]:
        self._directory.mkdir(parents=True, exist_ok=True)
        sync(self._directory.parent)
        for half in self._directory.glob(".*"):  # a store before was killed as it wrote it
            half.unlink(missing_ok=True)
        for unknown in self._directory.glob("*.unknown"):  # a start was cut off
            if not unknown.with_suffix(".json").exists():
                unknown.rename(unknown.with_suffix(".json"))
        found: list[JobVersions] = []
        lost: list[Lost] = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                found.append(record_in(path))
            except Damaged as error:
                # What says that nobody knows the job's versions is durable before the damaged
                # record goes: StorageFull leaves that where it is, for the next start.
                job, unknown = unquote(path.stem), path.with_suffix(".unknown")
                self._write(unknown, _content(JobVersions(job, known=False)))
                aside = damage.set_aside(path, self._directory.parent)
                unknown.rename(path)
                sync(path.parent)
                lost.append(Lost(job, path, error.message, aside))
        return found, lost


def write_record(path: Path, record: JobVersions) -> None:
    documents.put(path, _content(record))


def record_path(store: Path, job: str) -> Path:
    return _file(store / JOBS, job)


def _file(directory: Path, job: str) -> Path:
    return directory / f"{quote(job, safe='')}.json"


def _content(record: JobVersions) -> bytes:
    versions = {m: [number.lineage, number.version] for m, number in record.versions.items()}
    newest = [record.newest.lineage, record.newest.version, record.newest_manifest]
    told = {"versions": versions, "newest": newest, "anchors": sorted(record.anchors)}
    return sealed({"job": record.job, "run_dir": record.run_dir, **told, "known": record.known})


def record_in(path: Path) -> JobVersions:
    """The record in a file; NotFound, Damaged."""
    found = read_sealed(path)
    try:
        versions = {digest: Number(*number) for digest, number in found["versions"].items()}
        lineage, version, manifest = found["newest"]
        about = versions, Number(lineage, version), manifest, frozenset(found.get("anchors", ()))
        record = JobVersions(found["job"], found["run_dir"], *about, found["known"])
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise Damaged(f"it is no record of a job: {error!r}", where=str(path)) from error
    if record.job != unquote(path.stem):
        raise Damaged(f"it is that of {record.job}", where=str(path))
    return record
