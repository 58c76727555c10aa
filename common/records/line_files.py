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

from meshrl.common.api.weights import STORE_NAME, LineBatch, Weights
from meshrl.common.base.errors import BadMessage, MeshError, StorageFull
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.base.files.json_lines import add_check
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry

MAX_FILE_BYTES = 32 << 20  # twice that is what one file and the one before it take on the disk
ROTATED_SUFFIX = ".older.jsonl"
MAX_PENDING_BYTES = 8 << 20  # that wait while the store is away; what comes then is left out
BATCH_BYTES = 256 << 10  # of a message
CLOSE_TIMEOUT_S = 5.0  # for what waits when a process ends
# What the store writes for others: nothing else in a run's directory is a process's to name.
_NAME_PATTERN = re.compile(r"samples(-\d+)?|trace/[a-z]+(-[A-Za-z0-9_.]+)?")
FLUSH_BYTES = 16 << 10  # that are written at once,
FLUSH_INTERVAL_S = 1.0  # or what came since then
GROUP_MODULUS = 1 << 20  # numbers of groups are taken modulo this: evaluation's begin far up


class RunLineFile:
    """One such file on this host, by its name without the ending. BadMessage: nobody has lines of
    that name.
    """

    def __init__(self, host: Host, run_dir: Path, name: str) -> None:
        if _NAME_PATTERN.fullmatch(name) is None:
            raise BadMessage(f"{name!r} is no file of samples or traces", where=str(run_dir))
        self._host = host
        self._path = run_dir / f"{name}.jsonl"
        self._file: AppendFile | None = None

    def write(self, lines: bytes) -> None:
        """Appends whole lines; StorageFull leaves them out."""
        file = self._open_file()
        if file.tell() > 0 and file.tell() + len(lines) > MAX_FILE_BYTES:
            self.close_file()
            self._path.replace(self._path.with_suffix(ROTATED_SUFFIX))
            file = self._open_file()
        file.write(lines)

    def _open_file(self) -> AppendFile:
        if self._file is None:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self._file = self._host.open_append(self._path)
        return self._file

    def close_file(self) -> None:
        """Closes the file; the next write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    async def close(self) -> None:
        """The same, as a `LineSender` does."""
        self.close_file()


class LineSender:
    """Sends lines to where their run is at home. One batch is on its way at a time, so that they
    arrive in order.
    """

    def __init__(self, mesh: Mesh, job: str, name: str) -> None:
        self._mesh, self._job, self._name = mesh, job, name
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._send_task: asyncio.Task[None] | None = None

    def write(self, lines: bytes) -> None:
        """Hands whole lines over; StorageFull leaves them out, while the store is away for long."""
        if self._pending_bytes + len(lines) > MAX_PENDING_BYTES:
            raise StorageFull("the store is away", where=self._name)
        self._pending.append(lines)
        self._pending_bytes += len(lines)
        if self._send_task is None or self._send_task.done():
            self._send_task = asyncio.create_task(self._send(), name=self._name)

    async def close(self) -> None:
        """Sends what waits, within LAST_S."""
        if self._send_task is not None:
            await asyncio.wait([self._send_task], timeout=CLOSE_TIMEOUT_S)
            self._send_task.cancel()

    async def _send(self) -> None:
        store = self._mesh.ref(STORE_NAME)
        while self._pending:
            lines = [self._pending.popleft()]
            while self._pending and sum(map(len, lines)) < BATCH_BYTES:
                lines.append(self._pending.popleft())
            text = b"".join(lines).decode("utf-8", "replace")
            request = LineBatch(self._job, self._name, self._mesh.random.hex_token(8), text)
            try:
                await retry(
                    self._mesh.clock,
                    lambda request=request: store.call(Weights.append_lines, request),  # type: ignore[misc]
                )
            except MeshError as error:
                log = self._mesh.telemetry.log
                log.warning("lines are not kept", file=self._name, error=str(error))
            self._pending_bytes -= sum(map(len, lines))


LineWriter = RunLineFile | LineSender


def open_line_writer(mesh: Mesh, job: JobData, name: str) -> LineWriter:
    """Where a process of the job writes its lines called `name`."""
    if job.is_on_run_host:
        return RunLineFile(mesh.host, job.run_dir, name)
    return LineSender(mesh, job.id, name)


def sample_file_name(shard: int) -> str:
    """What a shard's file of samples is called."""
    return f"samples-{shard}" if shard else "samples"


class TraceWriter:
    """The traces of one process of a job; it writes none where the job asks for none."""

    def __init__(self, mesh: Mesh, job: JobData, name: str) -> None:
        self._mesh, self.traced_fraction = mesh, job.config.tracking.trace
        self._writer = open_line_writer(mesh, job, f"trace/{name}")
        self._buffer: list[bytes] = []
        self._buffer_bytes, self._next_line_number = 0, 0
        self._flushed_at = float("-inf")
        self._is_disk_full = False

    @property
    def is_enabled(self) -> bool:
        """Whether the job asks for any."""
        return self.traced_fraction > 0.0

    def is_traced(self, group: int) -> bool:
        """Whether the trajectories of a group are traced: `share` of the groups, evenly spread."""
        number = group % GROUP_MODULUS
        return int((number + 1) * self.traced_fraction) > int(number * self.traced_fraction)

    def write(self, row: Mapping[str, Any]) -> None:
        """Tells of one thing; what a full disk has no room for is left out."""
        if not self.is_enabled:
            return
        line = add_check(json.dumps(row), self._next_line_number)
        self._next_line_number += 1
        self._buffer.append(line)
        self._buffer_bytes += len(line)
        now = self._mesh.clock.monotonic()
        if self._buffer_bytes >= FLUSH_BYTES or now - self._flushed_at >= FLUSH_INTERVAL_S:
            self._flushed_at = now
            self._flush()

    def _flush(self) -> None:
        lines, self._buffer, self._buffer_bytes = b"".join(self._buffer), [], 0
        try:
            if lines:
                self._writer.write(lines)
            self._is_disk_full = False
        except StorageFull as error:
            if not self._is_disk_full:
                self._mesh.telemetry.log.warning("a trace is not kept", error=str(error))
            self._is_disk_full = True

    async def close(self) -> None:
        """Writes what is left."""
        self._flush()
        await self._writer.close()
