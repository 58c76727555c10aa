"""Who holds the directory of a mesh, on the head or on a host that has joined: one process at a
time, by a lock and by a file that names it; and the signals that end it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable
from typing import IO

from meshrl.common.base.errors import Refused
from meshrl.common.mesh.process.host import own_start_time
from meshrl.directory.ownership import made_private
from meshrl.directory.places import MeshPlace, write_json
from meshrl.launch.console import console
from meshrl.launch.ending import STOP_S

ECHO_S = 1.0  # one Ctrl-C may arrive twice, from the terminal and from a parent


class DirectoryHeld(Refused):
    """Another process holds the directory; it may be one that ends."""

    code = "held"
    retryable = True


class Hold:
    """This process's hold of a mesh's directory. `end_s`: that its end in order may take."""

    def __init__(self, place: MeshPlace, end_s: float = STOP_S) -> None:
        self._place, self._end_s = place, end_s
        self._lock: IO[str] | None = None
        self.ready = False  # what the holder has told last

    def take(self) -> None:
        """Makes the directory, for this user alone. Refused when another process holds it."""
        made_private(self._place.directory)
        lock = self._place.lock.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise DirectoryHeld(
                f"a mesh runs in {self._place.root} already",
                fix=f"`meshrl down --mesh {self._place.root}` stops it",
            ) from error
        self._lock = lock
        self._place.leaving.unlink(missing_ok=True)  # that was asked of who had it before
        self.tell(ready=False)

    def tell(self, ready: bool) -> None:
        self.ready = ready
        marker = {"pid": os.getpid(), "start_time": own_start_time(), "ready": ready}
        write_json(self._place.launcher, {**marker, "end_s": self._end_s})

    @property
    def held(self) -> bool:
        return self._lock is not None

    def give_back(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            self._place.launcher.unlink(missing_ok=True)
            lock.close()


def interruptible(stop: asyncio.Event, kill: Callable[[], None]) -> None:
    """SIGINT and SIGTERM set `stop`; a second one that is no echo ends everything at once."""
    loop = asyncio.get_running_loop()
    first_at = 0.0

    def on_signal() -> None:
        nonlocal first_at
        if not stop.is_set():
            first_at = loop.time()
            stop.set()
        elif loop.time() - first_at > ECHO_S:
            kill()
            console.end()
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
