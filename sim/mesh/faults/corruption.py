"""Damage to durable files at rest: which, how, and whether anybody has read it since."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.digest import compute_digest
from meshrl.common.base.files.corruption import QUARANTINE_DIRECTORY
from meshrl.common.base.files.disk_sync import fsync_path
from meshrl.common.base.random import Random

UNREAD_ATIME_NS = 1  # access time of a damaged file until somebody reads it
# Kinds of durable files (`meshrl.common.base.files.corruption.RECOVERY_BY_KIND`) of a virtual mesh,
# by where they lie. Its recorder, launcher and Redis are not the product's own: what those write is
# spared.
FILE_PATTERNS: dict[str, str] = {
    "checkpoint": "checkpoints/*.json",
    "state": "checkpoints/*/state/*",
    "exported": "checkpoints/*/*.safetensors",
    "chunk": "store/??/* store/groups/??/*",
    "versions": "store/jobs/*.json",
    "ledger": "**/*.ledger",
}
APPENDED_KINDS = ("ledger",)  # what is missing at their end may never have been written
HEADER_BYTES = 8


@dataclass(frozen=True)
class FileCorruption:
    kind: str
    path: str  # relative to the root
    method: str
    link: Path  # to the damaged file, wherever its name is now

    @property
    def was_read(self) -> bool:
        """Whether anybody has read the file since."""
        return self.method != "delete" and self.link.stat().st_atime_ns != UNREAD_ATIME_NS

    def is_replaced(self, root: Path) -> bool:
        """Whether what was written is there again, and this one is in quarantine; of a chunk, which
        is named by its digest, that it is there is enough.
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
    """Whether a message names the file, or the checkpoint that it is of."""
    parts = Path(path).parts
    of = parts[1].removesuffix(".json") if parts[0] == "checkpoints" else parts[-1]
    return parts[-1] in text or of in text


class FileCorruptor:
    """Damages files below `root`; what is damaged has a link in `links`."""

    def __init__(self, root: Path, links: Path, random: Random) -> None:
        self._root, self._links, self._random = root, links, random
        self.corruptions: list[FileCorruption] = []

    def corrupt_file(self) -> FileCorruption | None:
        """One file of a kind drawn first; None: there is none yet."""
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
        """Those that hold something and are as they were written, without scratch files, in one
        order.
        """
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
    """What was written last to `source` lies over `target` from `offset` on, as far as it goes."""
    content, there = read_without_atime(source), read_without_atime(target)
    part = content[-(len(there) - offset) :] or b"\0"
    if there[offset : offset + len(part)] == part:  # the same bytes would be no damage
        part = bytes(byte ^ 0xFF for byte in part)
    _overwrite(target, offset, part)


def _overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def read_without_atime(path: Path) -> bytes:
    """A file's bytes; its access time stays."""
    with open(os.open(path, os.O_RDONLY | os.O_NOATIME | os.O_CLOEXEC), "rb") as file:
        return file.read()
