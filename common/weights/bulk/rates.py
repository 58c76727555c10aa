"""How many bytes a second a host sends and receives at its bulk ports: all of its processes share
the two rates, through a file each.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from common.base.host.settings import MeshSettings

RATES = "rates"  # below a host's root
BURST_S = 0.02  # of what was not used lately: a thread that woke up late makes up for it
PIECE_S = 0.01  # what moves at once takes this long, so that connections share evenly
LEAST_BYTES = 16 << 10  # of a piece: below it the system calls cost more than they smooth
LONGEST_S = 60.0  # that anybody is ahead; more is of a clock that began anew with the machine
_FREE = struct.Struct("<d")  # when all that was moved so far is paid for, on the monotonic clock


class Rate:
    """One of them: who moves bytes says so, and waits as long as he is told before the next. A
    process that ends in between owes nothing.
    """

    def __init__(self, path: Path, bytes_per_s: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._bytes_per_s = bytes_per_s
        self._descriptor = descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, descriptor).atexit = False  # threads may be moving bytes
        if os.fstat(descriptor).st_size != _FREE.size:  # of those who have mapped it
            os.ftruncate(descriptor, _FREE.size)
        self._free = mmap.mmap(descriptor, _FREE.size)
        self._lock = threading.Lock()  # of this process's threads; the file's is of processes

    @property
    def piece_bytes(self) -> int:
        """The most that is moved at once."""
        return max(LEAST_BYTES, int(self._bytes_per_s * PIECE_S))

    def moved(self, size: int) -> float:
        """Says that bytes were moved; for how many seconds nobody may move more here."""
        with self._lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                now = time.monotonic()
                free: float = _FREE.unpack_from(self._free)[0]
                if not now - BURST_S < free < now + LONGEST_S:
                    free = now - BURST_S
                free += size / self._bytes_per_s
                _FREE.pack_into(self._free, 0, free)
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return max(0.0, free - now)


@dataclass(frozen=True)
class Rates:
    """Both; None: as fast as it goes."""

    up: Rate | None = None
    down: Rate | None = None

    @classmethod
    def of(cls, settings: MeshSettings) -> Rates:
        """Those of a host's settings."""
        root = Path(settings.run_root) / RATES
        up, down = settings.rate_up, settings.rate_down
        return cls(
            Rate(root / "up", up) if up else None, Rate(root / "down", down) if down else None
        )


UNLIMITED = Rates()
