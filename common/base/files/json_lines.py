"""Files of JSON lines with a check: each line has its number and a CRC-32 of itself.

The check detects corrupt, missing and repeated lines.

    {"step": 1, "reward": 0.5, "check": "0:1f2e3d4c"}

A file without any check was written by hand or by an earlier version, and is read unchecked. The
rest after the last newline is torn, by a crash or by a write in progress.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import CorruptData
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.base.files.corruption import quarantine
from meshrl.common.base.files.disk_sync import fsync_path

Row = dict[str, Any]
BLOCK_BYTES = 1 << 20  # of a file in memory at a time while its CRC is computed
_CHECK = re.compile(rb', "check": "(\d+):([0-9a-f]{8})"}$')
_UNTERMINATED = re.compile(rb', "check": "\d+:[0-9a-f]{8}"}.$', re.DOTALL)


def encode_row(row: Mapping[str, Any], number: int) -> bytes:
    """Encode a row with at least one field as a line with its newline; `number` counts from 0."""
    return add_check(json.dumps(row), number)


def add_check(row_json: str, number: int) -> bytes:
    """Add the check and a newline to a row in JSON."""
    prefix = f'{row_json[:-1]}, "check": "{number}:'.encode("utf-8", "replace")
    return prefix + f'{zlib.crc32(prefix):08x}"}}\n'.encode()


def decode_row(line: bytes) -> Row | None:
    """Decode a line without its newline, with or without a check; return None if it is corrupt."""
    found = _CHECK.search(line)
    if found is not None and zlib.crc32(line[: found.start(2)]) != int(found[2], 16):
        return None
    try:
        row = json.loads(line)
    except ValueError:  # also raised for bytes that are no text
        return None
    if not isinstance(row, dict):
        return None
    row.pop("check", None)
    return row


def has_check(line: bytes) -> bool:
    """Return True if a line without its newline ends with a check, valid or not."""
    return _CHECK.search(line) is not None


@dataclass(frozen=True)
class LineFileContent:
    """Content of a file: its intact rows, and its corruption, empty if there is none."""

    rows: list[Row] = field(default_factory=list)
    length_bytes: int = 0  # up to the end of the last line; the rest is torn
    next_number: int = 0  # number of the next line; with `rows` it shows how many are missing
    has_checks: bool = True  # its lines have checks
    corruption: str = ""
    intact_rows: int = 0  # rows before the corruption
    crc32: int = 0  # CRC-32 of its first `length_bytes` bytes


def read_lines(path: Path) -> LineFileContent:
    """Read the content of a file; a missing file is empty. Writes nothing."""
    content = path.read_bytes() if path.is_file() else b""
    end = content.rfind(b"\n") + 1
    texts = content[:end].split(b"\n")[:-1]
    tail = content[end:]
    wrong: list[str] = []
    if _UNTERMINATED.search(tail):  # a complete line whose newline has changed
        texts.append(tail[:-1])
        wrong.append(f"line {len(texts)} is unterminated")
    checked = not texts or any(_CHECK.search(text) for text in texts)
    rows: list[Row] = []
    due = before = 0
    for place, text in enumerate(texts, 1):
        row = decode_row(text)
        found = _CHECK.search(text)
        if row is None or (checked and found is None):
            wrong.append(f"line {place} is corrupt")
            continue
        number = int(found[1]) if found else due
        if number < due:
            wrong.append(f"line {place} is a duplicate")
            continue
        if number > due and not wrong:
            wrong.append(f"{number - due} lines before line {place} are missing")
        rows.append(row)
        due = number + 1
        before = before if wrong else len(rows)
    due = max(due, len(texts) if wrong else due)
    return LineFileContent(
        rows, end, due, checked, wrong[0] if wrong else "", before, zlib.crc32(content[:end])
    )


def iterate_rows(path: Path, *containing: str) -> Iterator[Row]:
    """Yield the intact rows of a file that another process may be writing.

    With `containing`, yield only rows of lines that contain one of these texts.
    """
    if not path.exists():
        return
    patterns = [text.encode() for text in containing]
    with path.open("rb") as file:
        for text in file:
            if text.endswith(b"\n") and (not patterns or any(one in text for one in patterns)):
                row = decode_row(text[:-1])
                if row is not None:
                    yield row


class LineFile:
    """File of lines with one writing process.

    Its content is read first. Only `append` and `replace` change it; the first of them truncates a
    torn tail.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = read_lines(path)
        self.next_number = self.content.next_number  # number of the next line
        self._signature = read_signature(path)
        self._length_bytes, self._crc = self.content.length_bytes, self.content.crc32

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append all rows or none.

        Raises StorageFull, and CorruptData if another process has changed the file.
        """
        self.require_unchanged()
        lines = [encode_row(row, self.next_number + n) for n, row in enumerate(rows)]
        file = AppendFile(self.path, truncate_to_bytes=self._length_bytes)
        try:
            file.write(added := b"".join(lines))
            self._length_bytes, self._crc = file.tell(), zlib.crc32(added, self._crc)
        finally:
            file.close()
            self._signature = read_signature(self.path)
        self.next_number += len(lines)

    def release_rows(self) -> None:
        """Release the memory of the rows that were read; `content` then has only the rest."""
        self.content = replace(self.content, rows=[])

    def require_unchanged(self) -> None:
        """Raise CorruptData if the file has changed since the last access."""
        now, known = read_signature(self.path), self._signature
        if now != known:
            if now and known and now[:2] == known[:2] and self._is_unchanged():
                self._signature = now  # only its time has changed, as after a touch
                return
            is_missing = not self.path.exists()
            raise CorruptData(
                "it is missing" if is_missing else "another process has changed it",
                where=str(self.path),
            )

    def _is_unchanged(self) -> bool:
        crc, remaining = 0, self._length_bytes
        with self.path.open("rb") as file:
            while block := file.read(min(remaining, BLOCK_BYTES)):
                crc, remaining = zlib.crc32(block, crc), remaining - len(block)
        return remaining == 0 and crc == self._crc

    def replace(
        self, rows: Iterable[Mapping[str, Any]], quarantine_root: Path | None = None
    ) -> Path | None:
        """Replace the file's rows, or leave it unchanged and raise StorageFull.

        With `quarantine_root`, move the old file below it and return its new path.
        """
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.unlink(missing_ok=True)  # left by a full disk
        lines = [encode_row(row, n) for n, row in enumerate(rows)]
        file = AppendFile(fresh)
        try:
            file.write(content := b"".join(lines))
            file.sync()
            self._length_bytes, self._crc = file.tell(), zlib.crc32(content)
        finally:
            file.close()
        quarantined = (
            quarantine(self.path, quarantine_root)
            if quarantine_root is not None and self.path.exists()
            else None
        )
        fresh.replace(self.path)
        fsync_path(self.path.parent)
        self.next_number, self._signature = len(lines), read_signature(self.path)
        return quarantined


def read_signature(path: Path) -> tuple[int, int, int] | None:
    """Return the identity, size and time of a file, which change with every write or
    replacement.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
