"""Damage to durable files at rest: which, how, and whether anybody has read it since."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.digest import digest_of
from meshrl.common.base.files.damage import QUARANTINE
from meshrl.common.base.files.durable import sync
from meshrl.common.base.random import Random

UNREAD_NS = 1  # access time of a damaged file until somebody reads it
# Kinds of durable files (`meshrl.common.base.files.damage.FATES`) of a virtual mesh, by where they
# lie. Its recorder, launcher and Redis are not the product's own: what those write is spared.
PLACES: dict[str, str] = {
    "checkpoint": "checkpoints/*.json",
    "state": "checkpoints/*/state/*",
    "exported": "checkpoints/*/*.safetensors",
    "chunk": "store/??/* store/groups/??/*",
    "versions": "store/jobs/*.json",
    "ledger": "**/*.ledger",
}
APPENDED = ("ledger",)  # what is missing at their end may never have been written
HEADER_BYTES = 8


@dataclass(frozen=True)
class Damage:
    kind: str
    path: str  # relative to the root
    how: str
    link: Path  # to the damaged file, wherever its name is now

    @property
    def read(self) -> bool:
        """Whether anybody has read the file since."""
        return self.how != "delete" and self.link.stat().st_atime_ns != UNREAD_NS

    def replaced(self, root: Path) -> bool:
        """Whether what was written is there again, and this one is in quarantine; of a chunk, which
        is named by its digest, that it is there is enough.
        """
        inode, place = self.link.stat().st_ino, root / self.path
        if not place.is_file() or place.stat().st_ino == inode:
            return False
        if self.kind == "chunk":
            return digest_of(unnoticed(place)) == place.name
        return inode in (path.stat().st_ino for path in root.glob(f"**/{QUARANTINE}/**/*"))


def named_in(path: str, text: str) -> bool:
    """Whether a message names the file, or the checkpoint that it is of."""
    parts = Path(path).parts
    of = parts[1].removesuffix(".json") if parts[0] == "checkpoints" else parts[-1]
    return parts[-1] in text or of in text


class Spoiler:
    """Damages files below `root`; what is damaged has a link in `links`."""

    def __init__(self, root: Path, links: Path, random: Random) -> None:
        self._root, self._links, self._random = root, links, random
        self.done: list[Damage] = []

    def spoil(self) -> Damage | None:
        """One file of a kind drawn first; None: there is none yet."""
        random = self._random
        there = {kind: found for kind, place in PLACES.items() if (found := self._files(place))}
        if not there:
            return None
        kind = random.choice(sorted(there))
        path = random.choice(there[kind])
        how = random.choice(["flip", "flip", "header", "truncate", "empty", "misdirect", "delete"])
        others = sorted(file for found in there.values() for file in found if file != path)
        self._links.mkdir(exist_ok=True)
        link = self._links / str(len(self.done))
        os.link(path, link)
        damage = Damage(kind, str(path.relative_to(self._root)), how, link)
        self.done.append(damage)
        if how == "delete":
            path.unlink()
            sync(path.parent)
        else:
            self._damage(path, how, random.choice(others) if others else path)
        return damage

    def _files(self, place: str) -> list[Path]:
        """Those that hold something and are as they were written, without scratch files, in one
        order.
        """
        known = {damage.link.stat().st_ino for damage in self.done}
        each = (path for pattern in place.split() for path in self._root.glob(pattern))
        found = (path for path in each if not path.name.startswith("."))
        files = sorted(path for path in found if path.is_file())
        return [p for p in files if (at := p.stat()).st_size and at.st_ino not in known]

    def _damage(self, path: Path, how: str, other: Path) -> None:
        status = path.stat()
        size, random = status.st_size, self._random
        changes: dict[str, Callable[[], None]] = {
            "flip": lambda: flip(path, random.randrange(size), random.randrange(8)),
            "header": lambda: flip(path, random.randrange(min(size, HEADER_BYTES)), 3),
            "truncate": lambda: os.truncate(path, random.randrange(size)),
            "empty": lambda: os.truncate(path, 0),
            "misdirect": lambda: misdirect(other, path, random.randrange(size)),
        }
        changes[how]()
        os.utime(path, ns=(UNREAD_NS, status.st_mtime_ns))


def flip(path: Path, offset: int, bit: int) -> None:
    byte = unnoticed(path)[offset] ^ 1 << bit
    _over(path, offset, bytes([byte]))


def misdirect(source: Path, target: Path, offset: int) -> None:
    """What was written last to `source` lies over `target` from `offset` on, as far as it goes."""
    content, there = unnoticed(source), unnoticed(target)
    part = content[-(len(there) - offset) :] or b"\0"
    if there[offset : offset + len(part)] == part:  # the same bytes would be no damage
        part = bytes(byte ^ 0xFF for byte in part)
    _over(target, offset, part)


def _over(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def unnoticed(path: Path) -> bytes:
    """A file's bytes; its access time stays."""
    with open(os.open(path, os.O_RDONLY | os.O_NOATIME | os.O_CLOEXEC), "rb") as file:
        return file.read()
