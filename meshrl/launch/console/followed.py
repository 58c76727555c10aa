"""A log file that is read as it grows, and whose beginning the disk gets back: in containers nobody
rotates it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from meshrl.launch.console.lines import LogObjects

MOST_BYTES = 64 << 20  # of a file on its disk
BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system
KEPT_BYTES = 1 << 20  # its end, which `meshrl logs` and the cause of a death are read from
PART_BYTES = 1 << 18  # at once, so that one that says much keeps no other waiting
LINE_BYTES = 1 << 20  # of a line: what is longer is told in parts
PATIENCE_S = 2.0  # for the rest of a line: who was killed within one does not end it
PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, with FALLOC_FL_KEEP_SIZE, of <linux/falloc.h>
_libc = ctypes.CDLL(None, use_errno=True)
_offset = ctypes.c_int64


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
        part = self._part()
        if part:
            self._grew_s = now_s
            yield from self._taken(part, timestamp)
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

    def bound(self) -> None:
        """Gives back what was read, but for the last megabyte, once the file takes too much room.
        Its size stays, as who reads it elsewhere counts from its beginning; where the disk can make
        no hole, it begins anew instead, once all was read.
        """
        try:
            found = os.stat(self._path)
            if found.st_blocks * BLOCK_BYTES <= MOST_BYTES:
                return
            with self._path.open("r+b", buffering=0) as file:
                until = min(found.st_size - KEPT_BYTES, self._at)
                if not _punched(file.fileno(), until) and self._at >= found.st_size:
                    file.truncate(0)
        except OSError:  # it is gone, or its disk does not let it: at the next look
            return

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
        if size < self._at:  # somebody made it anew, or cut it
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

    def _taken(self, part: bytes, timestamp: str) -> Iterator[str]:
        *whole, self._begun = (self._begun + part).split(b"\n")
        if len(self._begun) > LINE_BYTES:
            whole.append(self._begun)
            self._begun = b""
        for line in whole:
            yield from self._lines.take(_text(line), timestamp)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").replace("\0", "")


def _punched(file: int, until: int) -> bool:
    return until <= 0 or bool(_libc.fallocate(file, PUNCH_HOLE, _offset(0), _offset(until)) == 0)
