"""With `--foreground` the logs of all processes of a host go to its standard output, each line a
JSON object, for who collects the output of containers.

What the root process itself prints goes to a log file like any other: its descriptors 1 and 2 are
that file from then on. A thread follows all of them, and says what is left when the process ends.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.process.output.log_bounds import LOG_BYTES, bound_file
from meshrl.common.mesh.process.starting import opened_log
from meshrl.directory.ownership import made_private
from meshrl.directory.places import MeshPlace
from meshrl.launch.console.followed import Followed

POLL_S = 0.2
BOUND_S = 5.0  # between two looks whether a file is too long
BEHIND_BYTES = LOG_BYTES // 2  # that may wait to be printed: a file that is too long starts again
STEP_BYTES = 4096  # PIPE_BUF of Linux: a pipe that is writable takes so much without waiting
LAST_S = 5.0  # for what is left, when the process ends
_begun: list[LogPrinter] = []


def begin(place: MeshPlace, name: str) -> None:
    """From now on this process's output is the mesh's log `name`, and all logs there are printed as
    JSON where it was. Nothing happens the second time. ConfigError: nobody may write there.
    """
    if _begun:
        return
    try:
        made_private(place.directory)
        place.logs.mkdir(parents=True, exist_ok=True)
        console = LogPrinter(place.logs, os.dup(1))
        log = opened_log(place.log(name))
    except OSError as error:
        raise ConfigError(
            f"nothing can be written in {place.root}: {error}",
            where="--root",
            fix="Mount a volume there that this user may write",
        ) from error
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _begun.append(console)
    console.start()
    atexit.register(end)


def end() -> None:
    """Prints what is left, for five seconds at most; at exit, or before one without `atexit`."""
    sys.stdout.flush()
    sys.stderr.flush()
    for console in _begun:
        console.end()


class LogPrinter:
    """Follows the logs of a directory: what is there already has been told. Standard output that is
    not read holds up its thread alone, and one that is closed nothing.
    """

    def __init__(self, logs: Path, output: int) -> None:
        """`output`: a descriptor of its own."""
        self._logs, self._output = logs, output
        self._gone = False  # nobody reads the output any more, or its disk is full
        self._files = {path: Followed(path, path.stat().st_size) for path in logs.glob("*.log")}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="console", daemon=True)
        self._bounded_s = 0.0
        self._failed = ""  # why the last look could not be, once that was told

    @property
    def followed(self) -> int:
        return len(self._files)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Returns when all was printed, or cannot be."""
        self._ending.set()
        self._thread.join(LAST_S + 1.0)

    def _follow(self) -> None:
        behind = False
        while not self._ending.wait(0.0 if behind else POLL_S):
            behind = self._looked()
        until = time.monotonic() + LAST_S
        while self._looked() and not self._gone and time.monotonic() < until:
            pass
        self._looked(last=True)

    def _looked(self, last: bool = False) -> bool:
        """As `_look`. What keeps it from that, as too many open files, is told once; the next look
        may be whole.
        """
        try:
            behind, self._failed = self._look(last), ""
        except OSError as error:
            if self._failed != str(error):
                self._failed = str(error)
                self._tell(f"the logs cannot be followed now: {error}", "error")
            return False
        return behind

    def _look(self, last: bool) -> bool:
        """Prints a part of each file, and returns whether more is there. What was read is printed
        before more is: the rest waits on the disk.
        """
        there = sorted(self._logs.glob("*.log"))
        for path in there:
            self._files.setdefault(path, Followed(path, 0))
        now_s, timestamp, gone = time.monotonic(), _now(), self._files.keys() - there
        for path, file in list(self._files.items()):
            if path in gone:
                del self._files[path]
            new = file.rest(timestamp) if path in gone else file.objects(now_s, timestamp, last)
            self._print(new)
        if now_s - self._bounded_s > BOUND_S:
            self._bounded_s = now_s
            for path, file in self._files.items():
                if passed := file.pass_over(BEHIND_BYTES):
                    unread = f"{passed} bytes of {path.name} were not printed"
                    self._tell(f"{unread}: nobody read fast enough", "warning")
                bound_file(path)
        return any(file.behind for file in self._files.values())

    def _tell(self, event: str, level: str) -> None:
        about = {"service": "console", "event": event, "level": level, "timestamp": _now()}
        self._print([json.dumps(about)])

    def _print(self, objects: Iterable[str]) -> None:
        left = memoryview("".join(f"{one}\n" for one in objects).encode())
        try:
            while left and not self._gone:
                select.select([], [self._output], [])  # it may not wait by itself
                left = left[os.write(self._output, left[:STEP_BYTES]) :]
        except OSError:
            self._gone = True


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
