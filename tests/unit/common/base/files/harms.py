"""Corruptions of a file, each called with the path and an older copy's content."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Harm = Callable[[Path, bytes], None]


def flip(path: Path, older: bytes) -> None:
    """Flip one bit in the middle."""
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


@contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    """Prevent files of this process from growing beyond a size, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
