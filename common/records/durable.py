"""Durable writes: fsync of files and directories, before a write is acknowledged.

Every fsync of the mesh goes through here, so that a simulated disk knows what a power cut leaves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_hears: Callable[[int], None] | None = None


def heard_by(disk: Callable[[int], None] | None) -> None:
    """`disk` is told of each descriptor whose file or directory was synced; None: nobody is."""
    global _hears
    _hears = disk


def flush(descriptor: int) -> None:
    """Returns once what the open file or directory holds is on the disk."""
    os.fsync(descriptor)
    if _hears is not None:
        _hears(descriptor)


def flush_content(descriptor: int) -> None:
    """The same without what the file's content does not need to be read again, as its times."""
    os.fdatasync(descriptor)
    if _hears is not None:
        _hears(descriptor)


def sync(path: Path) -> None:
    """Writes a file's content, or a directory's list of names, to the disk. After a power cut a new
    or renamed file is there if both it and its directory were synced.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Syncs a directory and all that is below it."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)
