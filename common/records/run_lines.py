"""Files of lines that the processes of a job add to its run's directory, wherever that is: samples
and traces. A file starts again when it is long, and the one before it is kept.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.common.api.weights import STORE, KeepLines, Weights
from meshrl.common.base.errors import BadMessage, MeshError, StorageFull
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.base.files.lines import line_of
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently

FILE_BYTES = 32 << 20  # twice that is what one file and the one before it take on the disk
OLDER = ".older.jsonl"
MOST_BYTES = 8 << 20  # that wait while the store is away; what comes then is left out
BATCH_BYTES = 256 << 10  # of a message
LAST_S = 5.0  # for what waits when a process ends
# What the store writes for others: nothing else in a run's directory is a process's to name.
_NAMES = re.compile(r"samples(-\d+)?|trace/[a-z]+(-[A-Za-z0-9_.]+)?")
GATHERED_BYTES = 16 << 10  # that are written at once,
GATHERED_S = 1.0  # or what came since then
GROUPS = 1 << 20  # numbers of groups are taken modulo this: evaluation's begin far up


class RunLineFile:
    """One such file on this host, by its name without the ending. BadMessage: nobody has lines of
    that name.
    """

    def __init__(self, host: Host, run_dir: Path, name: str) -> None:
        if _NAMES.fullmatch(name) is None:
            raise BadMessage(f"{name!r} is no file of samples or traces", where=str(run_dir))
        self._host = host
        self._path = run_dir / f"{name}.jsonl"
        self._file: AppendFile | None = None

    def write(self, lines: bytes) -> None:
        """Appends whole lines; StorageFull leaves them out."""
        file = self._opened()
        if file.tell() > 0 and file.tell() + len(lines) > FILE_BYTES:
            self.shut()
            self._path.replace(self._path.with_suffix(OLDER))
            file = self._opened()
        file.write(lines)

    def _opened(self) -> AppendFile:
        if self._file is None:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self._file = self._host.open_append(self._path)
        return self._file

    def shut(self) -> None:
        """Closes the file; the next write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    async def close(self) -> None:
        """The same, as a `LineSender` does."""
        self.shut()


class LineSender:
    """Sends lines to where their run is at home. One batch is on its way at a time, so that they
    arrive in order.
    """

    def __init__(self, mesh: Mesh, job: str, name: str) -> None:
        self._mesh, self._job, self._name = mesh, job, name
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._sending: asyncio.Task[None] | None = None

    def write(self, lines: bytes) -> None:
        """Hands whole lines over; StorageFull leaves them out, while the store is away for long."""
        if self._bytes + len(lines) > MOST_BYTES:
            raise StorageFull("the store is away", where=self._name)
        self._waiting.append(lines)
        self._bytes += len(lines)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(), name=self._name)

    async def close(self) -> None:
        """Sends what waits, within LAST_S."""
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=LAST_S)
            self._sending.cancel()

    async def _send(self) -> None:
        store = self._mesh.ref(STORE)
        while self._waiting:
            lines = [self._waiting.popleft()]
            while self._waiting and sum(map(len, lines)) < BATCH_BYTES:
                lines.append(self._waiting.popleft())
            text = b"".join(lines).decode("utf-8", "replace")
            request = KeepLines(self._job, self._name, self._mesh.random.token(8), text)
            try:
                await patiently(
                    self._mesh.clock,
                    lambda request=request: store.call(Weights.keep_lines, request),  # type: ignore[misc]
                )
            except MeshError as error:
                log = self._mesh.telemetry.log
                log.warning("lines are not kept", file=self._name, error=str(error))
            self._bytes -= sum(map(len, lines))


Lines = RunLineFile | LineSender


def lines_of(mesh: Mesh, job: JobData, name: str) -> Lines:
    """Where a process of the job writes its lines called `name`."""
    if job.at_home:
        return RunLineFile(mesh.host, job.run_dir, name)
    return LineSender(mesh, job.id, name)


def sample_file(shard: int) -> str:
    """What a shard's file of samples is called."""
    return f"samples-{shard}" if shard else "samples"


class Traces:
    """The traces of one process of a job; it writes none where the job asks for none."""

    def __init__(self, mesh: Mesh, job: JobData, name: str) -> None:
        self._mesh, self.share = mesh, job.config.tracking.trace
        self._file = lines_of(mesh, job, f"trace/{name}")
        self._gathered: list[bytes] = []
        self._bytes, self._number = 0, 0
        self._written = float("-inf")
        self._full = False

    @property
    def wanted(self) -> bool:
        """Whether the job asks for any."""
        return self.share > 0.0

    def has(self, group: int) -> bool:
        """Whether the trajectories of a group are traced: `share` of the groups, evenly spread."""
        number = group % GROUPS
        return int((number + 1) * self.share) > int(number * self.share)

    def write(self, row: Mapping[str, Any]) -> None:
        """Tells of one thing; what a full disk has no room for is left out."""
        if not self.wanted:
            return
        line = line_of(json.dumps(row), self._number)
        self._number += 1
        self._gathered.append(line)
        self._bytes += len(line)
        now = self._mesh.clock.monotonic()
        if self._bytes >= GATHERED_BYTES or now - self._written >= GATHERED_S:
            self._written = now
            self._flush()

    def _flush(self) -> None:
        lines, self._gathered, self._bytes = b"".join(self._gathered), [], 0
        try:
            if lines:
                self._file.write(lines)
            self._full = False
        except StorageFull as error:
            if not self._full:
                self._mesh.telemetry.log.warning("a trace is not kept", error=str(error))
            self._full = True

    async def close(self) -> None:
        """Writes what is left."""
        self._flush()
        await self._file.close()
