"""With `--foreground` the logs of all processes of a host go to its standard output, each line a
JSON object, for who collects the output of containers.

What the root process itself prints goes to a log file like any other: its descriptors 1 and 2 are
that file from then on. A thread follows all of them, and says what is left when the process ends.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.process.output.log_bounds import LOG_BYTES, bound_file
from meshrl.common.mesh.process.starting import opened_log
from meshrl.directory.ownership import made_private
from meshrl.directory.places import MeshPlace

DEEP = 100  # brackets of a line: more may nest deeper than can be written
LONGEST = 1 << 16  # characters of one object's text: what is longer goes on in the next
BEGINS = "Traceback (most recent call last):"
# Redis: `812:M 23 Nov 2026 14:17:14.123 # text`; its marks are debug, verbose, notice, warning.
REDIS = re.compile(r"\d+:[A-Z] \d+ \w+ \d{4} [\d:.]+ ([-.*#]) ")
REDIS_LEVELS = {".": "debug", "-": "debug", "*": "info", "#": "warning"}
SAID = re.compile(r"(error|warning|critical|fatal)\b", re.IGNORECASE)


class LogObjects:
    """One log, line by line. What it has taken and not given may go on: see `rest`."""

    def __init__(self, service: str) -> None:
        """`service`: what the file says, until a line says it itself, and the job too."""
        self._whose = {"service": service}
        self._held: list[str] = []  # lines of one object that may not be whole
        self._length = 0
        self._traceback = False

    def take(self, line: str, timestamp: str) -> Iterator[str]:
        """The objects that are whole now. `timestamp`: for a line without one, in ISO 8601."""
        if (found := _object(line)) is not None:
            yield from self.rest(timestamp)
            said = {key: str(found[key]) for key in ("service", "job") if found.get(key)}
            self._whose = said if "service" in said else self._whose
            yield self._json(found, timestamp)
            return
        indented = line[:1] in (" ", "\t")
        if self._held and not indented and not self._traceback:
            yield from self.rest(timestamp)
        if not (line.strip() or self._held):
            return
        self._held.append(line)
        self._length += len(line)
        if line.endswith(BEGINS):  # perhaps after what somebody left unfinished
            self._traceback = True
        elif (self._traceback and not indented) or self._length > LONGEST:
            yield from self.rest(timestamp)

    def rest(self, timestamp: str) -> Iterator[str]:
        """What is held, as nothing more came that belongs to it."""
        held, self._held, self._length = self._held, [], 0
        traceback, self._traceback = self._traceback, False
        if held:
            level = "error" if traceback else _level(held[0])
            yield self._json({"event": "\n".join(held), "level": level}, timestamp)

    def _json(self, found: dict[str, Any], timestamp: str) -> str:
        whole = {"event": "", "level": "info", "timestamp": timestamp}
        return json.dumps(self._whose | whole | found)


def _object(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
        if line.count("[") + line.count("{") > DEEP:
            json.dumps(found)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _level(text: str) -> str:
    if redis := REDIS.match(text):
        return REDIS_LEVELS[redis[1]]
    said = SAID.match(text)
    return "info" if said is None else "warning" if said[1].lower() == "warning" else "error"


PART_BYTES = 1 << 18  # at once, so that one that says much keeps no other waiting
LINE_BYTES = 1 << 20  # of a line: what is longer is told in parts
PATIENCE_S = 2.0  # for the rest of a line: who was killed within one does not end it


class Followed:
    """One file. Writers append to it; it is opened for each look, as there may be thousands."""

    def __init__(self, path: Path, start: int) -> None:
        """`start`: where what is new begins."""
        self._path, self._at = path, start
        self._lines = LogObjects(path.stem)
        self._begun = b""  # of a line that is not whole
        self._grew_s = 0.0
        self.behind = False  # there was more than one part at the last look
        self._held = False

    def objects(self, now_s: float, timestamp: str, last: bool = False) -> Iterator[str]:
        """What came since the last look, at most `PART_BYTES` of it; with `last` also what is not
        whole.
        """
        if part := self._part():
            self._grew_s = now_s
            *whole, self._begun = (self._begun + part).split(b"\n")
            if len(self._begun) > LINE_BYTES:
                whole.append(self._begun)
                self._begun = b""
            for line in whole:
                yield from self._lines.take(_text(line), timestamp)
            self._held = True
        elif last or (self._begun and now_s - self._grew_s > PATIENCE_S):
            yield from self.rest(timestamp)
        elif self._held or self._begun:
            yield from self._lines.rest(timestamp)
            self._held = False

    def rest(self, timestamp: str) -> Iterator[str]:
        """What was read and not told, as it may go on."""
        begun, self._begun = self._begun, b""
        if begun:
            yield from self._lines.take(_text(begun), timestamp)
        yield from self._lines.rest(timestamp)
        self._held = False

    def pass_over(self, most: int) -> int:
        """Leaves out what is to be read, if that is more than `most` bytes; how many it was."""
        behind = self._size() - self._at
        if behind <= most:
            return 0
        self._at, self._begun = self._at + behind, b""
        return behind

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:  # it is gone: nothing more comes
            return self._at

    def _part(self) -> bytes:
        size = self._size()
        if size < self._at:  # it was made anew, or grew too long and starts again
            self._at, self._begun = 0, b""
        self.behind = False
        if size <= self._at:
            return b""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                part = file.read(PART_BYTES)
        except OSError:  # it is gone
            return b""
        self._at += len(part)
        self.behind = self._at < size
        return part


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").replace("\0", "")


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
                if passed or not file.behind:  # what is to be printed yet would be lost untold
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
                with suppress(BlockingIOError):  # it is not to wait, and has too little room
                    left = left[os.write(self._output, left[:STEP_BYTES]) :]
        except OSError:
            self._gone = True


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
