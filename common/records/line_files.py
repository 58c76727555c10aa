"""Line files that processes of a job append to in the run's directory: samples and traces.

A long file is rotated, and the previous one is retained.
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

MAX_FILE_BYTES = 32 << 20  # one file and its predecessor take twice this on the disk
ROTATED_SUFFIX = ".older.jsonl"
MAX_PENDING_BYTES = 8 << 20  # queued while the store is away; further lines are dropped
BATCH_BYTES = 256 << 10  # of a message
CLOSE_TIMEOUT_S = 5.0  # for queued lines when a process exits
# The store writes these files for other hosts: a process may name no other file of a run.
_NAME_PATTERN = re.compile(r"samples(-\d+)?|trace/[a-z]+(-[A-Za-z0-9_.-]+)?")
FLUSH_BYTES = 16 << 10  # written at once,
FLUSH_INTERVAL_S = 1.0  # or after this time
GROUP_MODULUS = 1 << 20  # of group numbers: those of evaluation are high


class RunLineFile:
    """One line file on this host, by its name without extension. BadMessage: invalid name."""

    def __init__(self, host: Host, run_dir: Path, name: str) -> None:
        if _NAME_PATTERN.fullmatch(name) is None:
            raise BadMessage(f"{name!r} is not a file of samples or traces", where=str(run_dir))
        self._host = host
        self._path = run_dir / f"{name}.jsonl"
        self._file: AppendFile | None = None

    def write(self, lines: bytes) -> None:
        """Append whole lines. StorageFull: they are dropped."""
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
        """Close the file; the next write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    async def close(self) -> None:
        """Close the file, as `LineSender.close` does."""
        self.close_file()


class LineSender:
    """Sender of lines to the run host. One batch is in flight at a time, to keep the order."""

    def __init__(self, mesh: Mesh, job: str, name: str) -> None:
        self._mesh, self._job, self._name = mesh, job, name
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._send_task: asyncio.Task[None] | None = None

    def write(self, lines: bytes) -> None:
        """Queue whole lines. StorageFull: they are dropped, because the store has been away for
        long.
        """
        if self._pending_bytes + len(lines) > MAX_PENDING_BYTES:
            raise StorageFull("the store is unavailable", where=self._name)
        self._pending.append(lines)
        self._pending_bytes += len(lines)
        if self._send_task is None or self._send_task.done():
            self._send_task = asyncio.create_task(self._send(), name=self._name)

    async def close(self) -> None:
        """Send the queued lines within `CLOSE_TIMEOUT_S`."""
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
                log.warning("lines cannot be saved", file=self._name, error=str(error))
            self._pending_bytes -= sum(map(len, lines))


LineWriter = RunLineFile | LineSender


def open_line_writer(mesh: Mesh, job: JobData, name: str) -> LineWriter:
    """Return the writer of a job process's lines called `name`."""
    if job.is_on_run_host:
        return RunLineFile(mesh.host, job.run_dir, name)
    return LineSender(mesh, job.id, name)


def sample_file_name(shard: int) -> str:
    """Return the file name of a shard's samples."""
    return f"samples-{shard}" if shard else "samples"


class TraceWriter:
    """Traces of one process of a job; it writes none unless the job enables them."""

    def __init__(self, mesh: Mesh, job: JobData, name: str) -> None:
        self._mesh, self.traced_fraction = mesh, job.config.tracking.trace
        self._writer = open_line_writer(mesh, job, f"trace/{name}")
        self._buffer: list[bytes] = []
        self._buffer_bytes, self._next_line_number = 0, 0
        self._flushed_at = float("-inf")
        self._is_disk_full = False

    @property
    def is_enabled(self) -> bool:
        """True if the job enables traces."""
        return self.traced_fraction > 0.0

    def is_traced(self, group: int) -> bool:
        """Return True if the group's trajectories are traced: `traced_fraction` of the groups,
        evenly.
        """
        number = group % GROUP_MODULUS
        return int((number + 1) * self.traced_fraction) > int(number * self.traced_fraction)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one trace row; it is dropped if the disk is full."""
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
                self._mesh.telemetry.log.warning("a trace cannot be saved", error=str(error))
            self._is_disk_full = True

    async def close(self) -> None:
        """Write the remaining rows and close the file."""
        self._flush()
        await self._writer.close()
