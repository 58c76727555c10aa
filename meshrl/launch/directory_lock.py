"""Lock of a mesh's directory, on the head or on a joined host, and the stop signals of its owner.

One process owns the directory at a time, by a lock and by a file that names the process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable
from typing import IO

from meshrl.common.base.errors import Refused
from meshrl.common.mesh.process.host import read_own_start_time
from meshrl.directory.directory_paths import MeshPaths, write_json
from meshrl.directory.file_ownership import create_private_directory
from meshrl.launch.console import log_printer
from meshrl.launch.shutdown import STOP_TIMEOUT_S

SIGNAL_DEBOUNCE_S = 1.0  # one Ctrl-C may arrive twice, from the terminal and from a parent


class DirectoryLocked(Refused):
    """Error raised when another process, which may be ending, owns the directory."""

    code = "held"
    retryable = True


class DirectoryLock:
    """Ownership of a mesh's directory by this process. `end_s`: seconds that its orderly end may
    take.
    """

    def __init__(self, mesh_paths: MeshPaths, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        self._place, self._stop_timeout_s = mesh_paths, stop_timeout_s
        self._lock: IO[str] | None = None
        self.is_ready = False  # the owner's last report

    def acquire(self) -> None:
        """Create the directory, for this user alone, and lock it. Raises Refused when another
        process owns it.
        """
        create_private_directory(self._place.directory)
        lock = self._place.lock.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise DirectoryLocked(
                f"a mesh already runs in {self._place.root}",
                fix=f"Run `meshrl down --mesh {self._place.root}` to stop it",
            ) from error
        self._lock = lock
        self._place.leave_marker.unlink(missing_ok=True)  # a request to the former owner
        self.set_ready(ready=False)

    def set_ready(self, ready: bool) -> None:
        self.is_ready = ready
        marker = {"pid": os.getpid(), "start_time": read_own_start_time(), "ready": ready}
        write_json(self._place.root_marker, {**marker, "end_s": self._stop_timeout_s})

    @property
    def is_locked(self) -> bool:
        return self._lock is not None

    def release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            self._place.root_marker.unlink(missing_ok=True)
            lock.close()


def handle_stop_signals(stop: asyncio.Event, kill: Callable[[], None]) -> None:
    """Make SIGINT and SIGTERM set `stop`; a second one that is no echo kills everything at once."""
    loop = asyncio.get_running_loop()
    first_at = 0.0

    def on_signal() -> None:
        nonlocal first_at
        if not stop.is_set():
            first_at = loop.time()
            stop.set()
        elif loop.time() - first_at > SIGNAL_DEBOUNCE_S:
            kill()
            log_printer.finish_printing()
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
