"""Limits of a log file: the rate at which a process may write to it, and its length.

Only the standard library: each process that runs a job author's code has a guard that imports this.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time

RATE_BYTES_PER_S = (
    1 << 20
)  # bytes a second that a process may write to its log; what is beyond is dropped
BURST_BYTES = 4 << 20  # bytes that it may write at once
MAX_LOG_BYTES = (
    16 << 20
)  # length of a log at which it starts again; the part before it is kept once
PREVIOUS_SUFFIX = ".1"  # behind the name of a log: the part before it
COPY_BYTES = 1 << 20
NOTICE = re.compile(rb"\[meshrl: this log goes on from \S+; (\d+) bytes before that were deleted\]")


class LogBudget:
    """A token bucket of bytes that also counts what was dropped.

    After a drop nothing is let through until a second's worth of bytes is there, so that a process
    that prints for ever gives one notice a second.
    """

    def __init__(self) -> None:
        self._budget_bytes, self._refilled_at = float(BURST_BYTES), time.monotonic()
        self.dropped_bytes = 0  # bytes since the last notice

    def allow(self, size_bytes: int) -> int:
        """Return `most` if so many bytes may be written now, else 0."""
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
        """Return the line that reports what was dropped, and count anew; empty if nothing was."""
        dropped, self.dropped_bytes = self.dropped_bytes, 0
        if not dropped:
            return b""
        limit = f"over {RATE_BYTES_PER_S / (1 << 20):g} MiB a second"
        return f"\n[meshrl: {dropped} bytes of output dropped: {limit}]\n".encode()


def rotate_if_long(fd: int, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Start a log again that is longer than `most` bytes; True if it was.

    Its content goes to `NAME.1`, in place of an older part. `fd` writes to it by appending, as all
    others that have it open do, so they write on at its new end.
    """
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size <= max_bytes:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process is at it
        return False
    try:
        if os.fstat(fd).st_size <= max_bytes:
            return False
        path = os.readlink(f"/proc/self/fd/{fd}")
        deleted = _save_previous(path, about)
        os.ftruncate(fd, 0)
        kept = os.path.basename(path) + PREVIOUS_SUFFIX
        line = f"[meshrl: this log goes on from {kept}; {deleted} bytes before that were deleted]\n"
        os.write(fd, line.encode())
        return True
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def rotate_file_if_long(path: str | os.PathLike[str]) -> None:
    """Start a log again that is too long, whatever processes write to it, if there is one."""
    try:
        if os.stat(path).st_size <= MAX_LOG_BYTES:
            return
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # it has gone, or no descriptor is to be had: at the next look
        return
    try:
        rotate_if_long(log)
    except OSError:  # a full disk, which it was cut short on anyway
        return
    finally:
        os.close(log)


def _save_previous(path: str, about: os.stat_result) -> int:
    """Copy a log to where its part before is kept; return how many bytes are there no more."""
    try:
        source = os.open(path, os.O_RDONLY)
    except OSError:  # it was deleted, and is only truncated
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
        except OSError:  # no room: what is saved so far stays
            return deleted + about.st_size - os.fstat(target).st_size
        finally:
            os.close(target)
    finally:
        os.close(source)
