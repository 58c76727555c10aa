"""Standard output and error for a log on a full disk: output without space is dropped without an
error.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from typing import Any

from meshrl.common.base.host.terminal import EscapingStream, unwrap_stream
from meshrl.common.mesh.process.output.log_bounds import LogBudget

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _LossyStream(io.FileIO):
    """Stream to a descriptor that drops what a full disk rejects.

    For a log file it also drops what `log_bounds` does not allow.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        # Behind a pipe the guard enforces the limit for all writers.
        self._budget = LogBudget() if stat.S_ISREG(os.fstat(number).st_mode) else None

    def write(self, content: Any) -> int:
        if self._budget is not None:
            size = len(memoryview(content).cast("B"))
            if not self._budget.allow(size):
                self._budget.dropped_bytes += size
                return size
            self._budget.spend(size)
            if notice := self._budget.take_notice():
                self._write_lossy(notice)
        return self._write_lossy(content)

    def _write_lossy(self, content: Any) -> int:
        try:
            return super().write(content) or 0
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            return len(memoryview(content).cast("B"))


def install_lossy_output() -> None:
    """Replace this process's own standard output and error by lossy streams; keep redirected
    ones.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        own = unwrap_stream(stream) if stream is not None else None
        if own is None or own is not getattr(sys, f"__{name}__") or own.isatty():
            continue
        lossy = io.TextIOWrapper(
            io.BufferedWriter(_LossyStream(number)),
            encoding=own.encoding,
            errors=own.errors,
            line_buffering=True,
            write_through=name == "stderr",
        )
        setattr(sys, name, lossy if own is stream else EscapingStream(lossy))
        setattr(sys, f"__{name}__", lossy)
