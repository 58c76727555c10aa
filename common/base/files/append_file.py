"""File that grows by complete records: a partial record of a full disk is truncated."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files.disk_sync import fdatasync

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # errors of writes without space


class AppendFile:
    """File to which write(2) appends records: each is in the kernel when `write` returns, or not at
    all.

    `max_length_bytes` returns a bound on the file's length, -1 for none (a simulated disk has one).
    Bytes after `truncate_to_bytes`, if set, are a torn tail and removed.
    """

    def __init__(
        self,
        path: Path,
        max_length_bytes: Callable[[], int] = lambda: -1,
        truncate_to_bytes: int | None = None,
    ) -> None:
        self.path = path
        self._max_length_bytes = max_length_bytes
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._to_storage_full(error, "the disk has no space for a new file") from error
        self._length = os.lseek(self._fd, 0, os.SEEK_END)
        if truncate_to_bytes is not None and truncate_to_bytes < self._length:
            os.ftruncate(self._fd, truncate_to_bytes)
            self._length = truncate_to_bytes

    def write(self, record: bytes) -> None:
        """Append one complete record or none. StorageFull: the disk is full, and the file is
        unchanged.
        """
        view, written = memoryview(record), 0
        try:
            while written < len(view):
                if 0 <= self._max_length_bytes() < self._length + len(view):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += os.write(self._fd, view[written:])
        except OSError as error:
            os.ftruncate(self._fd, self._length)
            problem = f"the disk has no space for {len(view)} bytes after {self._length}"
            raise self._to_storage_full(error, problem) from error
        self._length += len(view)

    def _to_storage_full(self, error: OSError, problem: str) -> Exception:
        """Return the exception to raise for `error`: StorageFull for a full disk."""
        if error.errno not in DISK_FULL_ERRNOS:
            return error
        return StorageFull(
            problem,
            where=str(self.path),
            fix="Free space on this disk; the writer continues after the last complete record",
        )

    def tell(self) -> int:
        """Return the length in bytes of the complete records."""
        return self._length

    def sync(self) -> None:
        """Return once all written bytes are on disk."""
        fdatasync(self._fd)

    @property
    def is_open(self) -> bool:
        """Return True if the file is open for writing."""
        return self._fd >= 0

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
