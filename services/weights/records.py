"""The store's records for each job, in files beside the chunks: Redis may lose all it has, and what
a job would go on from must outlive that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from common.errors import BadMessage
from common.process.host import Host
from common.records.durable import sync
from common.wire.chunks import failure
from services.weights.retention import Number

IO_S = 30.0  # deadline of one file operation


@dataclass
class JobVersions:
    job: str
    run_dir: str = ""  # empty before the first checkpoint
    versions: dict[str, Number] = field(default_factory=dict)  # by manifest, of all that are kept


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

    async def open(self) -> None:
        """Reads what an earlier start wrote; BadMessage when somebody else has changed it."""
        found = await self._host.run_blocking(self._read, deadline_s=IO_S)
        self._records = {record.job: record for record in found}

    async def save(self, job: str) -> None:
        """Makes the job's record durable as it is now; StorageFull leaves the one before."""
        async with self._writing:
            content = _content(self.of(job))
            await self._host.run_blocking(self._write, self._path(job), content, deadline_s=IO_S)

    def _path(self, job: str) -> Path:
        return self._directory / f"{quote(job, safe='')}.json"

    def _write(self, path: Path, content: bytes) -> None:
        try:
            self._host.replace_file(path, content)
        except OSError as error:
            raise failure(error, path) from error

    def _read(self) -> list[JobVersions]:
        self._directory.mkdir(parents=True, exist_ok=True)
        sync(self._directory.parent)
        return [_parsed(path) for path in sorted(self._directory.glob("*.json"))]


def _content(record: JobVersions) -> bytes:
    versions = {m: [number.lineage, number.version] for m, number in record.versions.items()}
    written = {"job": record.job, "run_dir": record.run_dir, "versions": versions}
    return json.dumps(written).encode()


def _parsed(path: Path) -> JobVersions:
    try:
        found = json.loads(path.read_bytes())
        versions = {digest: Number(*number) for digest, number in found["versions"].items()}
        return JobVersions(found["job"], found["run_dir"], versions)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadMessage(
            f"the record of a job's versions does not read: {error!r}",
            where=str(path),
            fix="restore the file, or remove it once Redis knows the job",
        ) from error
