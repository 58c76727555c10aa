"""Which chunk files of a host have just been found right, so that each is hashed once for all of
the processes that receive a version together.

A line in `<run_root>/.verified` says it of a file as it was, and when: another one under its name,
or one that was written to since, is hashed again, and so is one that was hashed before. Disks
change files without a trace in size or times, so nobody believes a line for long. It is a cache:
without it each process hashes for itself.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from common.clock import Clock
from common.runtime.mesh import Mesh

NAME = ".verified"
MOST_BYTES = 8 << 20  # of lines, some 100 bytes each: begun anew beyond that
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the clock of a host begins anew with it


class Verified:
    """What processes of a host have said, and this one."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """`clock`: its monotonic time is one for all processes of a host."""
        self._path, self._clock = path, clock
        self._boot = _boot()
        # What a file was when it was right, and when that was, by digest.
        self._known: dict[str, tuple[str, float]] = {}
        self._read_to = 0  # bytes of the lines
        self._inode = -1

    @classmethod
    def of_host(cls, mesh: Mesh) -> Verified:
        """That of the host of a process."""
        return cls(Path(mesh.settings.run_root) / NAME, mesh.clock)

    def knows(self, digest: str, stat: os.stat_result, since: float) -> bool:
        """Whether the file of these figures has been found to have that digest, not before `since`
        of this host's monotonic clock.
        """
        told = self._told(stat)
        if not self._right(digest, told, since):
            self._look()
        return self._right(digest, told, since)

    def _right(self, digest: str, told: str, since: float) -> bool:
        known, at = self._known.get(digest, ("", 0.0))
        return known == told and since <= at <= self._clock.monotonic()

    def note(self, digest: str, file: Path | os.stat_result) -> None:
        """Says that a file has that digest: the one of these figures, which were taken before it
        was hashed, or one that was made of what was hashed.
        """
        with suppress(OSError):
            stat = file.stat() if isinstance(file, Path) else file
            told, at = self._told(stat), self._clock.monotonic()
            self._known[digest] = told, at
            line = f"{digest} {at!r} {told}\n".encode()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
            try:
                if os.fstat(descriptor).st_size > MOST_BYTES:
                    self._path.unlink()
                os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def _look(self) -> None:
        """Reads what was said since."""
        with suppress(OSError), self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._read_to = inode, 0
            file.seek(self._read_to)
            lines = file.read()
            whole = lines.rfind(b"\n") + 1  # the last one may be on its way
            self._read_to += whole
            for line in lines[:whole].decode("ascii", "replace").splitlines():
                with suppress(ValueError):  # whatever nobody wrote
                    digest, at, told = line.split(" ", 2)
                    self._known[digest] = told, float(at)

    def _told(self, stat: os.stat_result) -> str:
        return f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {self._boot}"


def _boot() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return "unknown"
