"""Printer of all logs of a host to its standard output under `--foreground`.

Each line is a JSON object, for collectors of container output. The root process's own output goes
to a log file like any other: its descriptors 1 and 2 are that file. A thread follows all logs and
prints the rest when the process ends.
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
from meshrl.common.mesh.process.output.log_bounds import MAX_LOG_BYTES, rotate_file_if_long
from meshrl.common.mesh.process.spawning import open_log
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.file_ownership import create_private_directory

MAX_BRACKETS = 100  # brackets of a line: more may nest too deeply for the encoder
MAX_OBJECT_CHARS = 1 << 16  # characters of one object's text: the rest goes to the next one
TRACEBACK_START = "Traceback (most recent call last):"
# Redis: `812:M 23 Nov 2026 14:17:14.123 # text`; its marks are debug, verbose, notice, warning.
REDIS_LINE = re.compile(r"\d+:[A-Z] \d+ \w+ \d{4} [\d:.]+ ([-.*#]) ")
REDIS_LEVELS = {".": "debug", "-": "debug", "*": "info", "#": "warning"}
LEVEL_PREFIX = re.compile(r"(error|warning|critical|fatal)\b", re.IGNORECASE)


class LogLineParser:
    """Parser of one log, line by line. It retains lines that may continue; see `flush`."""

    def __init__(self, service: str) -> None:
        """`service`: the value of the field until a line names its service, and its job."""
        self._source_fields = {"service": service}
        self._pending_lines: list[str] = []  # lines of one object that may be incomplete
        self._pending_chars = 0
        self._in_traceback = False

    def add_line(self, line: str, timestamp: str) -> Iterator[str]:
        """Yield the objects that are complete. `timestamp`: for a line without one, in ISO 8601."""
        if (found := _parse_object(line)) is not None:
            yield from self.flush(timestamp)
            source_fields = {key: str(found[key]) for key in ("service", "job") if found.get(key)}
            self._source_fields = (
                source_fields if "service" in source_fields else self._source_fields
            )
            yield self._format_object(found, timestamp)
            return
        indented = line[:1] in (" ", "\t")
        if self._pending_lines and not indented and not self._in_traceback:
            yield from self.flush(timestamp)
        if not (line.strip() or self._pending_lines):
            return
        self._pending_lines.append(line)
        self._pending_chars += len(line)
        if line.endswith(TRACEBACK_START):  # perhaps after an unfinished entry
            self._in_traceback = True
        elif (self._in_traceback and not indented) or self._pending_chars > MAX_OBJECT_CHARS:
            yield from self.flush(timestamp)

    def flush(self, timestamp: str) -> Iterator[str]:
        """Yield the retained lines as an object, as no line continued them."""
        lines, self._pending_lines, self._pending_chars = self._pending_lines, [], 0
        traceback, self._in_traceback = self._in_traceback, False
        if lines:
            level = "error" if traceback else _detect_level(lines[0])
            yield self._format_object({"event": "\n".join(lines), "level": level}, timestamp)

    def _format_object(self, fields: dict[str, Any], timestamp: str) -> str:
        defaults = {"event": "", "level": "info", "timestamp": timestamp}
        return json.dumps(self._source_fields | defaults | fields)


def _parse_object(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
        if line.count("[") + line.count("{") > MAX_BRACKETS:
            json.dumps(found)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _detect_level(text: str) -> str:
    if redis := REDIS_LINE.match(text):
        return REDIS_LEVELS[redis[1]]
    prefix = LEVEL_PREFIX.match(text)
    return "info" if prefix is None else "warning" if prefix[1].lower() == "warning" else "error"


READ_BYTES = 1 << 18  # per read: a busy log does not delay the others
MAX_LINE_BYTES = 1 << 20  # of a line: longer ones are printed in parts
PARTIAL_LINE_TIMEOUT_S = 2.0  # for the rest of a line: a killed process leaves it unfinished


class LogFollower:
    """Follower of one file that other processes append to. It opens the file for each poll, as
    there may be thousands of files.
    """

    def __init__(self, path: Path, offset: int) -> None:
        """`offset`: the byte where new content begins."""
        self._path, self._offset = path, offset
        self._parser = LogLineParser(path.stem)
        self._partial_line = b""  # of an incomplete line
        self._last_growth_s = 0.0
        self.is_behind = False  # there was more than one part at the last poll
        self._has_pending = False

    def read_objects(self, now_s: float, timestamp: str, is_final: bool = False) -> Iterator[str]:
        """Yield the objects that were appended since the last poll, from at most `READ_BYTES`. With
        `is_final` also yield incomplete ones.
        """
        if part := self._read_part():
            self._last_growth_s = now_s
            *complete_lines, self._partial_line = (self._partial_line + part).split(b"\n")
            if len(self._partial_line) > MAX_LINE_BYTES:
                complete_lines.append(self._partial_line)
                self._partial_line = b""
            for line in complete_lines:
                yield from self._parser.add_line(_decode_line(line), timestamp)
            self._has_pending = True
        elif is_final or (
            self._partial_line and now_s - self._last_growth_s > PARTIAL_LINE_TIMEOUT_S
        ):
            yield from self.flush(timestamp)
        elif self._has_pending or self._partial_line:
            yield from self._parser.flush(timestamp)
            self._has_pending = False

    def flush(self, timestamp: str) -> Iterator[str]:
        """Yield the content that was read and retained because it could continue."""
        partial_line, self._partial_line = self._partial_line, b""
        if partial_line:
            yield from self._parser.add_line(_decode_line(partial_line), timestamp)
        yield from self._parser.flush(timestamp)
        self._has_pending = False

    def skip_backlog(self, max_bytes: int) -> int:
        """Skip unread content if it exceeds `max_bytes`, and return how many bytes were skipped."""
        behind = self._read_size() - self._offset
        if behind <= max_bytes:
            return 0
        self._offset, self._partial_line = self._offset + behind, b""
        return behind

    def _read_size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:  # the file is gone: it does not grow any more
            return self._offset

    def _read_part(self) -> bytes:
        size = self._read_size()
        if size < self._offset:  # the file was recreated, or was truncated as too long
            self._offset, self._partial_line = 0, b""
        self.is_behind = False
        if size <= self._offset:
            return b""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                part = file.read(READ_BYTES)
        except OSError:  # the file is gone
            return b""
        self._offset += len(part)
        self.is_behind = self._offset < size
        return part


def _decode_line(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").replace("\0", "")


POLL_S = 0.2
SIZE_CHECK_S = 5.0  # between two checks for files that are too long
MAX_BACKLOG_BYTES = MAX_LOG_BYTES // 2  # unprinted backlog: a file that is too long starts again
WRITE_BYTES = 4096  # PIPE_BUF of Linux: a pipe that is writable takes so much without waiting
FLUSH_TIMEOUT_S = 5.0  # for the remaining lines, when the process ends
_printers: list[LogPrinter] = []


def start_printing(mesh_paths: MeshPaths, log_name: str) -> None:
    """Redirect this process's output to the mesh's log `log_name`, and print all logs there as JSON
    to the former output.

    A second call does nothing. Raises ConfigError if the directory is not writable.
    """
    if _printers:
        return
    try:
        create_private_directory(mesh_paths.directory)
        mesh_paths.logs.mkdir(parents=True, exist_ok=True)
        console = LogPrinter(mesh_paths.logs, os.dup(1))
        log = open_log(mesh_paths.log_path(log_name))
    except OSError as error:
        raise ConfigError(
            f"{mesh_paths.root} is not writable: {error}",
            where="--root",
            fix="Mount a volume there that this user can write to",
        ) from error
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _printers.append(console)
    console.start()
    atexit.register(finish_printing)


def finish_printing() -> None:
    """Print the rest of the logs, for five seconds at most. Runs at exit; call it before an exit
    that skips `atexit`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for console in _printers:
        console.stop()


class LogPrinter:
    """Follower of the logs of a directory, except their content before the start. An unread
    standard output blocks this thread alone; a closed one blocks nothing.
    """

    def __init__(self, logs: Path, output: int) -> None:
        """`output`: a descriptor that this object owns."""
        self._logs, self._output = logs, output
        self._is_output_closed = False  # no process reads the output, or its disk is full
        self._files = {path: LogFollower(path, path.stat().st_size) for path in logs.glob("*.log")}
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._size_checked_s = 0.0
        self._last_error = ""  # error of the last poll, once it was printed

    @property
    def file_count(self) -> int:
        return len(self._files)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after all was printed, or cannot be."""
        self._stop_event.set()
        self._thread.join(FLUSH_TIMEOUT_S + 1.0)

    def _run(self) -> None:
        behind = False
        while not self._stop_event.wait(0.0 if behind else POLL_S):
            behind = self._poll_reporting_errors()
        until = time.monotonic() + FLUSH_TIMEOUT_S
        while (
            self._poll_reporting_errors()
            and not self._is_output_closed
            and time.monotonic() < until
        ):
            pass
        self._poll_reporting_errors(is_final=True)

    def _poll_reporting_errors(self, is_final: bool = False) -> bool:
        """Poll once and return whether more content waits. Print each new error once, such as too
        many open files; the next poll may succeed.
        """
        try:
            behind, self._last_error = self._poll(is_final), ""
        except OSError as error:
            if self._last_error != str(error):
                self._last_error = str(error)
                self._print_event(f"the logs cannot be followed: {error}", "error")
            return False
        return behind

    def _poll(self, is_final: bool) -> bool:
        """Print a part of each file, and return whether more content waits. Printing precedes the
        next read, so the rest waits on the disk.
        """
        there = sorted(self._logs.glob("*.log"))
        for path in there:
            self._files.setdefault(path, LogFollower(path, 0))
        now_s, timestamp, removed_paths = (
            time.monotonic(),
            _format_now(),
            self._files.keys() - there,
        )
        for path, file in list(self._files.items()):
            if path in removed_paths:
                del self._files[path]
            new = (
                file.flush(timestamp)
                if path in removed_paths
                else file.read_objects(now_s, timestamp, is_final)
            )
            self._print(new)
        if now_s - self._size_checked_s > SIZE_CHECK_S:
            self._size_checked_s = now_s
            for path, file in self._files.items():
                if skipped_bytes := file.skip_backlog(MAX_BACKLOG_BYTES):
                    unread = f"{skipped_bytes} bytes of {path.name} were not printed"
                    self._print_event(f"{unread}: the reader of the output is too slow", "warning")
                # The unread part of another file would be lost without a notice.
                if skipped_bytes or not file.is_behind:
                    rotate_file_if_long(path)
        return any(file.is_behind for file in self._files.values())

    def _print_event(self, event: str, level: str) -> None:
        about = {"service": "console", "event": event, "level": level, "timestamp": _format_now()}
        self._print([json.dumps(about)])

    def _print(self, objects: Iterable[str]) -> None:
        remaining = memoryview("".join(f"{one}\n" for one in objects).encode())
        try:
            while remaining and not self._is_output_closed:
                select.select([], [self._output], [])  # the descriptor may be non-blocking
                with suppress(BlockingIOError):  # non-blocking, and its buffer is full
                    remaining = remaining[os.write(self._output, remaining[:WRITE_BYTES]) :]
        except OSError:
            self._is_output_closed = True


def _format_now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
