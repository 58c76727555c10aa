"""The record of a run: a line for whatever happens, and a digest of all lines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TextIO


class Record:
    """`say` takes what is the same on every machine; of paths, those below `root`."""

    def __init__(self, now: Callable[[], float], root: Path, log: Path | None = None) -> None:
        self._now, self._root = now, str(root)
        self._hash = hashlib.blake2b(digest_size=16)
        self._file: TextIO | None = log.open("w") if log is not None else None
        self.lines = 0

    def say(self, what: str) -> None:
        """A line that counts for the digest."""
        line = f"{self._now():.6f} {what}\n".replace(self._root, "ROOT")
        self._hash.update(line.encode())
        self.lines += 1
        if self._file is not None:
            self._file.write(line)

    def note(self, what: str) -> None:
        """A line for readers of the log alone."""
        if self._file is not None:
            self._file.write(f"{self._now():.6f}   {what}\n")

    @property
    def written(self) -> bool:
        """Whether anybody will read notes."""
        return self._file is not None

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
