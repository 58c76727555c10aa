"""The record of a run: a line for whatever happens, and a digest of all lines."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

WRITTEN_AT = 1 << 16  # bytes of lines


class EventRecord:
    """`say` takes what is the same on every machine; of paths, those below `root`."""

    def __init__(self, now: Callable[[], float], root: Path, log: Path | None = None) -> None:
        self._now, self._root = now, str(root)
        self._hash = hashlib.blake2b(digest_size=16)
        self._log = -1
        if log is not None:
            self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._unwritten = bytearray()
        self.lines = 0

    def say(self, what: str) -> None:
        """A line that counts for the digest."""
        line = f"{self._now():.6f} {what}\n".replace(self._root, "ROOT")
        self._hash.update(line.encode())
        self.lines += 1
        self._write(line)

    def note(self, what: str) -> None:
        """A line for readers of the log alone."""
        self._write(f"{self._now():.6f}   {what}\n")

    def _write(self, line: str) -> None:
        if self._log < 0:
            return
        self._unwritten += line.encode()
        if len(self._unwritten) >= WRITTEN_AT:
            with suppress(OSError):  # the simulated disk's limit, which is the whole process's
                del self._unwritten[: os.write(self._log, self._unwritten)]

    @property
    def written(self) -> bool:
        """Whether anybody will read notes."""
        return self._log >= 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        if self._log >= 0:
            while self._unwritten:
                del self._unwritten[: os.write(self._log, self._unwritten)]
            os.close(self._log)
            self._log = -1
