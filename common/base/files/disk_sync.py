"""Durable writes: fsync of files and directories, before a write is acknowledged.

Every fsync of the mesh goes through here, so that a simulated disk can take its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_disk: Callable[[int], None] | None = None


def simulate_disk(on_sync: Callable[[int], None] | None) -> None:
    """Have `synced` called with each descriptor in place of a sync, by which a simulated disk
    remembers what a power cut leaves; None: the real disk again.
    """
    global _disk
    _disk = on_sync


def fsync(descriptor: int) -> None:
    """Returns once what the open file or directory holds is on the disk."""
    if _disk is None:
        os.fsync(descriptor)
    else:
        _disk(descriptor)


def fdatasync(descriptor: int) -> None:
    """The same without what the file's content does not need to be read again, as its times."""
    if _disk is None:
        os.fdatasync(descriptor)
    else:
        _disk(descriptor)


def fsync_path(path: Path) -> None:
    """Writes a file's content, or a directory's list of names, to the disk. After a power cut a new
    or renamed file is there if both it and its directory were synced.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Syncs a directory and all that is below it."""
    for path in [*directory.rglob("*"), directory]:
        fsync_path(path)
