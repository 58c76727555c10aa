"""What may happen to a file: each takes it, and an older copy to put over it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

Harm = Callable[[Path, bytes], None]


def flip(path: Path, older: bytes) -> None:
    """One bit, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path, older: bytes) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path, older: bytes) -> None:
    path.write_bytes(b"")


def delete(path: Path, older: bytes) -> None:
    path.unlink()


def older_copy(path: Path, older: bytes) -> None:
    path.write_bytes(older)


HARMS: list[Harm] = [flip, truncate, empty, delete, older_copy]
