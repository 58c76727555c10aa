"""Extent of Redis's append-only file at the last check.

A server loads a truncated file without an error, and one in which a byte has changed, because its
commands have no checksums. Content that is only appended to can be compared with its former
beginning.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.checksum import Checksummer

AOF_DIRECTORY = "appendonlydir"
AOF_MANIFEST = "appendonly.aof.manifest"
READ_BYTES = 1 << 20  # bytes that are read at a time


@dataclass(frozen=True)
class Extent:
    """Beginning of a file: its length in bytes, and its checksum."""

    length_bytes: int
    checksum: str  # hexadecimal


class AofFollower:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checksums: dict[str, tuple[int, Checksummer]] = {}
        self._read_lock = threading.Lock()  # an abandoned read continues in its thread

    def read_extents(self) -> dict[str, Extent]:
        """Return the files in use as written so far; none where Redis has written nothing.

        Raises OSError when one cannot be read.
        """
        with self._read_lock:
            return self._read_extents()

    def _read_extents(self) -> dict[str, Extent]:
        parts = _read_manifest(self._directory)
        self._checksums = {name: read for name, read in self._checksums.items() if name in parts}
        for name in parts:
            path = self._directory / AOF_DIRECTORY / name
            length, summed = self._checksums.get(name, (0, Checksummer()))
            # Redis truncates a write that a full disk has cut short.
            if path.stat().st_size < length:
                length, summed = 0, Checksummer()
            self._checksums[name] = _extend_checksum(path, length, summed)
        return {
            name: Extent(at, summed.checksum.hex())
            for name, (at, summed) in self._checksums.items()
        }


def has_extents(directory: Path, extents: Mapping[str, Extent]) -> bool:
    """Return True if each file has at least its length, or no longer exists. Raises OSError."""
    paths = {
        directory / AOF_DIRECTORY / name: extent.length_bytes for name, extent in extents.items()
    }
    return all(not path.is_file() or path.stat().st_size >= n for path, n in paths.items())


def explain_difference(directory: Path, extents: Mapping[str, Extent]) -> str:
    """Return why the files below `directory` do not begin with their extents; empty when they do.

    A part that has been rewritten since has a successor of a higher number.
    """
    parts = _read_manifest(directory)
    for name, extent in extents.items():
        if name not in parts:
            kind, number = _parse_kind(name), _parse_number(name)
            if any(_parse_kind(other) == kind and _parse_number(other) > number for other in parts):
                continue
            return f"its manifest no longer lists {name}"
        path = directory / AOF_DIRECTORY / name
        size = path.stat().st_size if path.is_file() else 0
        if size < extent.length_bytes:
            return f"{name} has {size} bytes, fewer than the recorded {extent.length_bytes}"
        read, summed = _extend_checksum(path, 0, Checksummer(), extent.length_bytes)
        if read != extent.length_bytes or summed.checksum.hex() != extent.checksum:
            return f"the content of {name} differs from what was written"
    return ""


def _read_manifest(directory: Path) -> list[str]:
    """Return the files that the manifest names: a base, and its increments."""
    path = directory / AOF_DIRECTORY / AOF_MANIFEST
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    words = [line.split() for line in lines]
    return [w[1] for w in words if len(w) >= 6 and w[0] == "file" and w[5] in ("b", "i")]


def _parse_kind(name: str) -> str:
    """Return `base` or `incr`, as of appendonly.aof.3.incr.aof."""
    return name.split(".")[-2]


def _parse_number(name: str) -> int:
    return int(name.split(".")[-3])


def _extend_checksum(
    path: Path, start: int, checksummer: Checksummer, end: int | None = None
) -> tuple[int, Checksummer]:
    """Return the checksum of the first `start` bytes, extended to `end` or the file's end."""
    with path.open("rb") as file:
        file.seek(start)
        while end is None or start < end:
            block = file.read(READ_BYTES if end is None else min(READ_BYTES, end - start))
            if not block:
                break
            checksummer.update(block)
            start += len(block)
    return start, checksummer
