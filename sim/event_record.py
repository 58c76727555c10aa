"""Record of a run: a line per event, and a digest of all lines."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BUFFER_BYTES = 1 << 16  # bytes of lines


class EventRecord:
    """Event record. `log_event` receives texts that are equal on every machine; paths below `root`
    are shortened.
    """

    def __init__(
        self, get_time_s: Callable[[], float], root: Path, log: Path | None = None
    ) -> None:
        self._get_time_s, self._root = get_time_s, str(root)
        self._hash = hashlib.blake2b(digest_size=16)
        self._log_descriptor = -1
        if log is not None:
            self._log_descriptor = os.open(
                log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
            )
        self._buffer = bytearray()
        self.line_count = 0

    def log_event(self, text: str) -> None:
        """Log a line that counts for the digest."""
        line = f"{self._get_time_s():.6f} {text}\n".replace(self._root, "ROOT")
        self._hash.update(line.encode())
        self.line_count += 1
        self._write(line)

    def log_note(self, text: str) -> None:
        """Log a line outside of the digest."""
        self._write(f"{self._get_time_s():.6f}   {text}\n")

    def _write(self, line: str) -> None:
        if self._log_descriptor < 0:
            return
        self._buffer += line.encode()
        if len(self._buffer) >= BUFFER_BYTES:
            with suppress(OSError):  # the simulated disk's limit applies to the whole process
                del self._buffer[: os.write(self._log_descriptor, self._buffer)]

    @property
    def has_log(self) -> bool:
        """True if notes are written to a log."""
        return self._log_descriptor >= 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        if self._log_descriptor >= 0:
            while self._buffer:
                del self._buffer[: os.write(self._log_descriptor, self._buffer)]
            os.close(self._log_descriptor)
            self._log_descriptor = -1
