"""Limits of a log file: the rate at which a process may write to it, and its length.

Only the standard library: each process that runs a job author's code has a guard that imports this.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time

RATE_BYTES_PER_S = 1 << 20  # bytes per second that a process may write to its log; more is dropped
BURST_BYTES = 4 << 20  # maximum burst
MAX_LOG_BYTES = 16 << 20  # length at which a log is rotated; one previous part is kept
PREVIOUS_SUFFIX = ".1"  # suffix of a log's previous part
COPY_BYTES = 1 << 20
NOTICE = re.compile(rb"\[meshrl: this log continues \S+; (\d+) earlier bytes were deleted\]")


class LogBudget:
    """Token bucket of bytes that also counts dropped bytes.

    After a drop nothing passes until a second's worth of bytes is available, so that endless output
    gives one notice per second.
    """

    def __init__(self) -> None:
        self._budget_bytes, self._refilled_at = float(BURST_BYTES), time.monotonic()
        self.dropped_bytes = 0  # bytes since the last notice

    def allow(self, size_bytes: int) -> int:
        """Return `size_bytes` if that many bytes may be written now, else 0."""
        now = time.monotonic()
        self._budget_bytes = min(
            BURST_BYTES, self._budget_bytes + (now - self._refilled_at) * RATE_BYTES_PER_S
        )
        self._refilled_at = now
        return (
            size_bytes
            if self._budget_bytes >= (RATE_BYTES_PER_S if self.dropped_bytes else size_bytes)
            else 0
        )

    def spend(self, size: int) -> None:
        """Count bytes that were written."""
        self._budget_bytes -= size

    def take_notice(self) -> bytes:
        """Return the line that reports dropped output, and reset its count; empty if none was
        dropped.
        """
        dropped, self.dropped_bytes = self.dropped_bytes, 0
        if not dropped:
            return b""
        limit = f"over {RATE_BYTES_PER_S / (1 << 20):g} MiB per second"
        return f"\n[meshrl: {dropped} bytes of output dropped: {limit}]\n".encode()


def rotate_if_long(fd: int, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Rotate a log that is longer than `max_bytes`; return True if it was.

    Its content goes to `NAME.1`, in place of an older part. All writers have the log open for
    appending, as `fd` is, so they continue at its new end.
    """
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size <= max_bytes:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process rotates it
        return False
    try:
        if os.fstat(fd).st_size <= max_bytes:
            return False
        path = os.readlink(f"/proc/self/fd/{fd}")
        deleted = _save_previous(path, about)
        os.ftruncate(fd, 0)
        previous_name = os.path.basename(path) + PREVIOUS_SUFFIX
        line = (
            f"[meshrl: this log continues {previous_name}; {deleted} earlier bytes were deleted]\n"
        )
        os.write(fd, line.encode())
        return True
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def rotate_file_if_long(path: str | os.PathLike[str]) -> None:
    """Rotate a log that is too long, whichever processes write to it, if it exists."""
    try:
        if os.stat(path).st_size <= MAX_LOG_BYTES:
            return
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # missing, or no descriptor is left: retry at the next check
        return
    try:
        rotate_if_long(log)
    except OSError:  # a full disk; the log is truncated anyway
        return
    finally:
        os.close(log)


def _save_previous(path: str, about: os.stat_result) -> int:
    """Copy a log to the path of its previous part; return the number of bytes that were deleted."""
    try:
        source = os.open(path, os.O_RDONLY)
    except OSError:  # it was deleted, so it is only truncated
        return about.st_size
    try:
        if not os.path.samestat(os.fstat(source), about):
            return about.st_size
        found = NOTICE.match(os.pread(source, 512, 0))
        deleted = int(found[1]) if found else 0
        target = os.open(path + PREVIOUS_SUFFIX, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            deleted += os.fstat(target).st_size
            os.ftruncate(target, 0)
            at, size = 0, os.fstat(source).st_size
            while at < size and (sent := os.sendfile(target, source, at, COPY_BYTES)):
                at += sent
            return deleted
        except OSError:  # no space: keep the part that is saved
            return deleted + about.st_size - os.fstat(target).st_size
        finally:
            os.close(target)
    finally:
        os.close(source)
