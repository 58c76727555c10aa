"""A log file that is read as it grows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from meshrl.launch.console.lines import LogObjects

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
