"""Corruption of durable files at rest: the file, the method, and whether the file was read
afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.digest import compute_digest
from meshrl.common.base.files.corruption import QUARANTINE_DIRECTORY
from meshrl.common.base.files.disk_sync import fsync_path
from meshrl.common.base.random import Random

UNREAD_ATIME_NS = 1  # access time of a corrupt file before its first read
# Kinds of durable files (`meshrl.common.base.files.corruption.RECOVERY_BY_KIND`) of a virtual mesh,
# by path. Its recorder, launcher and Redis are not the product's own, so their files are not
# corrupted.
FILE_PATTERNS: dict[str, str] = {
    "checkpoint": "checkpoints/*.json",
    "state": "checkpoints/*/state/*",
    "exported": "checkpoints/*/*.safetensors",
    "chunk": "store/??/* store/groups/??/*",
    "versions": "store/jobs/*.json",
    "ledger": "**/*.ledger",
}
APPENDED_KINDS = ("ledger",)  # missing data at their end may never have been written
HEADER_BYTES = 8


@dataclass(frozen=True)
class FileCorruption:
    kind: str
    path: str  # relative to the root
    method: str
    link: Path  # to the corrupt file, after any rename

    @property
    def was_read(self) -> bool:
        """True if the file was read since its corruption."""
        return self.method != "delete" and self.link.stat().st_atime_ns != UNREAD_ATIME_NS

    def is_replaced(self, root: Path) -> bool:
        """Return True if the original content exists again, and the corrupt file is in quarantine.
        For a chunk, named by its digest, valid content is enough.
        """
        inode, place = self.link.stat().st_ino, root / self.path
        if not place.is_file() or place.stat().st_ino == inode:
            return False
        if self.kind == "chunk":
            return compute_digest(read_without_atime(place)) == place.name
        return inode in (
            path.stat().st_ino for path in root.glob(f"**/{QUARANTINE_DIRECTORY}/**/*")
        )


def is_named_in(path: str, text: str) -> bool:
    """Return True if a message names the file or its checkpoint."""
    parts = Path(path).parts
    of = parts[1].removesuffix(".json") if parts[0] == "checkpoints" else parts[-1]
    return parts[-1] in text or of in text


class FileCorruptor:
    """Corruptor of files below `root`; corrupt files are linked in `links`."""

    def __init__(self, root: Path, links: Path, random: Random) -> None:
        self._root, self._links, self._random = root, links, random
        self.corruptions: list[FileCorruption] = []

    def corrupt_file(self) -> FileCorruption | None:
        """Corrupt one file of a randomly drawn kind; return None if there is no file yet."""
        random = self._random
        there = {
            kind: found
            for kind, place in FILE_PATTERNS.items()
            if (found := self._find_files(place))
        }
        if not there:
            return None
        kind = random.choice(sorted(there))
        path = random.choice(there[kind])
        how = random.choice(["flip", "flip", "header", "truncate", "empty", "misdirect", "delete"])
        others = sorted(file for found in there.values() for file in found if file != path)
        self._links.mkdir(exist_ok=True)
        link = self._links / str(len(self.corruptions))
        os.link(path, link)
        damage = FileCorruption(kind, str(path.relative_to(self._root)), how, link)
        self.corruptions.append(damage)
        if how == "delete":
            path.unlink()
            fsync_path(path.parent)
        else:
            self._corrupt(path, how, random.choice(others) if others else path)
        return damage

    def _find_files(self, patterns: str) -> list[Path]:
        """Find the non-empty, intact files except temporary ones, in a fixed order."""
        known = {damage.link.stat().st_ino for damage in self.corruptions}
        each = (path for pattern in patterns.split() for path in self._root.glob(pattern))
        found = (path for path in each if not path.name.startswith("."))
        files = sorted(path for path in found if path.is_file())
        return [p for p in files if (at := p.stat()).st_size and at.st_ino not in known]

    def _corrupt(self, path: Path, method: str, other: Path) -> None:
        status = path.stat()
        size, random = status.st_size, self._random
        changes: dict[str, Callable[[], None]] = {
            "flip": lambda: flip_bit(path, random.randrange(size), random.randrange(8)),
            "header": lambda: flip_bit(path, random.randrange(min(size, HEADER_BYTES)), 3),
            "truncate": lambda: os.truncate(path, random.randrange(size)),
            "empty": lambda: os.truncate(path, 0),
            "misdirect": lambda: write_misdirected(other, path, random.randrange(size)),
        }
        changes[method]()
        os.utime(path, ns=(UNREAD_ATIME_NS, status.st_mtime_ns))


def flip_bit(path: Path, offset: int, bit: int) -> None:
    byte = read_without_atime(path)[offset] ^ 1 << bit
    _overwrite(path, offset, bytes([byte]))


def write_misdirected(source: Path, target: Path, offset: int) -> None:
    """Overwrite `target` from `offset` on with the last written data of `source`, as a misdirected
    write does.
    """
    content, there = read_without_atime(source), read_without_atime(target)
    part = content[-(len(there) - offset) :] or b"\0"
    if there[offset : offset + len(part)] == part:  # identical bytes would be no corruption
        part = bytes(byte ^ 0xFF for byte in part)
    _overwrite(target, offset, part)


def _overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def read_without_atime(path: Path) -> bytes:
    """Read a file without a change of its access time."""
    with open(os.open(path, os.O_RDONLY | os.O_NOATIME | os.O_CLOEXEC), "rb") as file:
        return file.read()
