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
from datetime import UTC, datetime
from pathlib import Path

from common.base.errors import ConfigError
from common.mesh.process.output.log_bounds import LOG_BYTES, bound_file
from common.mesh.process.starting import opened_log
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
        console = LogPrinter(place.logs, ObjectOutput(os.dup(1)))
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


class ObjectOutput:
    """The standard output that objects go to, by a descriptor of its own: one that is closed, full
    or stuck hinders nobody. `gone` once nobody reads it any more.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left = b""  # that was not taken yet
        self.gone = False

    @property
    def stuck(self) -> bool:
        """Whether something is left that it has not taken."""
        return bool(self._left) and not self.gone

    def add(self, text: str) -> None:
        if not self.gone:
            self._left += text.encode()

    def write(self, patience_s: float) -> None:
        """Hands over what there is, as far as it is taken; waits so long for each 4 KiB."""
        left = memoryview(self._left)
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while left and not self.gone:
            if not poll.poll(patience_s * 1000):
                break
            try:
                left = left[os.write(self._descriptor, left[:STEP_BYTES]) :]
            except BlockingIOError:
                break
            except OSError:  # its reader has gone, or its disk is full
                self.gone = True
        self._left = bytes(left)


class LogPrinter:
    """Follows the logs of a directory: what is there already has been told."""

    def __init__(self, logs: Path, output: ObjectOutput) -> None:
        self._logs, self._output = logs, output
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
        while self._looked() and not self._output.gone and time.monotonic() < until:
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
                self._output.write(POLL_S)
            return False
        return behind

    def _look(self, last: bool = False) -> bool:
        """Prints a part of each file, and returns whether more is there. What was read is handed
        over before more is: a reader that is slow holds up this thread alone, and the rest waits on
        the disk.
        """
        self._output.write(POLL_S)
        there = sorted(self._logs.glob("*.log"))
        for path in there:
            self._files.setdefault(path, Followed(path, 0))
        now_s, timestamp, gone = time.monotonic(), _now(), self._files.keys() - there
        for path, file in list(self._files.items()):
            if self._output.stuck:
                break
            if path in gone:
                del self._files[path]
            told = file.rest(timestamp) if path in gone else file.objects(now_s, timestamp, last)
            for line in told:
                self._output.add(line + "\n")
            self._output.write(POLL_S)
        if now_s - self._bounded_s > BOUND_S:
            self._bounded_s = now_s
            self._bound()
        return self._output.stuck or any(file.behind for file in self._files.values())

    def _bound(self) -> None:
        for path, file in self._files.items():
            if passed := file.pass_over(BEHIND_BYTES):
                told = f"{passed} bytes of {path.name} were not printed: nobody read fast enough"
                self._tell(told, "warning")
            bound_file(path)

    def _tell(self, event: str, level: str) -> None:
        about = {"service": "console", "event": event, "level": level, "timestamp": _now()}
        self._output.add(json.dumps(about) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
