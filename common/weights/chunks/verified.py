"""Record of which chunk files of a directory were hashed a short time ago, so that each is hashed
once for all processes of a host: by the process that stored it.

A line in `<directory>/.verified` names a digest, the time, and the file as it was: one that was
written to, replaced or renamed since is hashed again. A disk that changes bits leaves no trace in
these figures, so a line counts for `TRUSTED_S` only. The record is a cache: without it each process
hashes for itself. Who may write to it may write to the chunks, too: the mesh's user.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NAME = ".verified"
TRUSTED_S = 600.0  # more than a version takes from its publisher to all engines of a host
MOST_BYTES = 8 << 20  # of lines, some 150 bytes each: begun anew beyond that
BOOT = Path("/proc/sys/kernel/random/boot_id")  # what was not on the disk is lost with it


class Verified:
    """The record of one directory, as this process has read it."""

    def __init__(self, path: Path, wall: Callable[[], float]) -> None:
        """`wall`: the time, in seconds of the epoch, which all processes of a host have alike."""
        self._path, self._wall = path, wall
        self._boot = ""
        # Figures of a file when it was right, and when that was, by digest.
        self._known: dict[str, tuple[str, float]] = {}
        self._read_to = 0  # bytes of the lines
        self._inode = -1

    def knows(self, digest: str, stat: os.stat_result) -> bool:
        """True if the file of these figures was found to have that digest within `TRUSTED_S`."""
        figures = self._figures(stat)
        if not self._trusts(digest, figures):
            self._read()
        return self._trusts(digest, figures)

    def _trusts(self, digest: str, figures: str) -> bool:
        known, at = self._known.get(digest, ("", 0.0))
        return known == figures and 0.0 <= self._wall() - at <= TRUSTED_S

    def note(self, digest: str, file: Path | os.stat_result) -> None:
        """Record that a file has that digest: the one of these figures, which were taken before it
        was hashed, or one that was made of what was hashed.
        """
        with suppress(OSError):
            stat = file.stat() if isinstance(file, Path) else file
            figures, at = self._figures(stat), self._wall()
            self._known[digest] = figures, at
            line = f"{digest} {at!r} {figures}\n".encode()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
            try:
                if os.fstat(descriptor).st_size > MOST_BYTES:
                    self._path.unlink()
                os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def _read(self) -> None:
        with suppress(OSError), self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._read_to = inode, 0
            file.seek(self._read_to)
            lines = file.read()
            whole = lines.rfind(b"\n") + 1  # the last one may be on its way
            self._read_to += whole
            for line in lines[:whole].decode("ascii", "replace").splitlines():
                with suppress(ValueError):  # a line that no process of ours wrote
                    digest, at, figures = line.split(" ", 2)
                    self._known[digest] = figures, float(at)

    def _figures(self, stat: os.stat_result) -> str:
        self._boot = self._boot or _boot()
        times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
        return f"{stat.st_dev} {stat.st_ino} {stat.st_size} {times} {self._boot}"


def _boot() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return "unknown"
