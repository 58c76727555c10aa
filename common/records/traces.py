"""What a process of a job tells of where time goes, a line of `RUN/trace/NAME.jsonl` for each thing
that has ended. `meshrl trace` draws it. A file that is torn, or lacks its last second, is fine.

    {"kind": "trajectory", "at": <s, wall>, "parts": ["queue", <ms>, "prefill", <ms>, ...], ...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from common.base.errors import StorageFull
from common.base.files.lines import line_of
from common.job.bundle.job_data import JobData
from common.mesh.runtime.mesh import Mesh
from common.records.run_lines import lines_of

GATHERED_BYTES = 16 << 10  # that are written at once,
GATHERED_S = 1.0  # or what came since then
GROUPS = 1 << 20  # numbers of groups are taken modulo this: evaluation's begin far up


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
