"""Record of recently hashed chunk files of a directory.

Each file is hashed once for all processes of a host, by the process that stored it. A line in
`<directory>/.verified` has a digest, the time and the file's status. A file that was written,
replaced or renamed since is hashed again. Bit errors of a disk do not change the file status, so a
line is valid for `TRUST_DURATION_S` only. The record is a cache: without it each process hashes for
itself. Only the mesh's user may write to it, as to the chunks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

RECORD_FILE = ".verified"
TRUST_DURATION_S = 600.0  # longer than a version takes from its publisher to all engines of a host
MAX_RECORD_BYTES = 8 << 20  # of lines, some 150 bytes each; a larger record starts again
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")  # a reboot loses unsynced files


class VerifiedFiles:
    """Record of one directory, as read by this process."""

    def __init__(self, path: Path, wall_clock: Callable[[], float]) -> None:
        """Open the record.

        Args:
            wall_clock: Time in seconds since the epoch, shared by all processes of a host.
        """
        self._path, self._wall_clock = path, wall_clock
        self._boot_id = ""
        # A file's fingerprint and the time of its verification, by digest.
        self._verified_by_digest: dict[str, tuple[str, float]] = {}
        self._read_offset = 0  # bytes of the lines
        self._inode = -1

    def is_verified(self, digest: str, stat: os.stat_result) -> bool:
        """Return True if a file with this status had that digest within `TRUST_DURATION_S`."""
        figures = self._make_fingerprint(stat)
        if not self._is_trusted(digest, figures):
            self._read_new_lines()
        return self._is_trusted(digest, figures)

    def _is_trusted(self, digest: str, fingerprint: str) -> bool:
        known, at = self._verified_by_digest.get(digest, ("", 0.0))
        return known == fingerprint and 0.0 <= self._wall_clock() - at <= TRUST_DURATION_S

    def record(self, digest: str, file: Path | os.stat_result) -> None:
        """Record that a file has that digest.

        Args:
            file: Its status from before hashing, or the path of a file just written from hashed
                bytes.
        """
        with suppress(OSError):
            stat = file.stat() if isinstance(file, Path) else file
            figures, at = self._make_fingerprint(stat), self._wall_clock()
            self._verified_by_digest[digest] = figures, at
            line = f"{digest} {at!r} {figures}\n".encode()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
            try:
                if os.fstat(descriptor).st_size > MAX_RECORD_BYTES:
                    self._path.unlink()
                os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def _read_new_lines(self) -> None:
        with suppress(OSError), self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._read_offset = inode, 0
            file.seek(self._read_offset)
            lines = file.read()
            complete_bytes = lines.rfind(b"\n") + 1  # another process may be writing the last one
            self._read_offset += complete_bytes
            for line in lines[:complete_bytes].decode("ascii", "replace").splitlines():
                with suppress(ValueError):  # a malformed line
                    digest, at, figures = line.split(" ", 2)
                    self._verified_by_digest[digest] = figures, float(at)

    def _make_fingerprint(self, stat: os.stat_result) -> str:
        self._boot_id = self._boot_id or _read_boot_id()
        times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
        return f"{stat.st_dev} {stat.st_ino} {stat.st_size} {times} {self._boot_id}"


def _read_boot_id() -> str:
    try:
        return BOOT_ID_PATH.read_text().strip()
    except OSError:
        return "unknown"
