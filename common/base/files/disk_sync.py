"""Durable writes: fsync of files and directories, before a write is acknowledged.

Every fsync of the mesh uses this module, so that a simulated disk can replace it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_disk: Callable[[int], None] | None = None


def simulate_disk(on_sync: Callable[[int], None] | None) -> None:
    """Call `on_sync` with each descriptor instead of a sync; None restores the real disk.

    A simulated disk thereby records the state that a power failure leaves.
    """
    global _disk
    _disk = on_sync


def fsync(descriptor: int) -> None:
    """Return once the content of an open file or directory is on disk."""
    if _disk is None:
        os.fsync(descriptor)
    else:
        _disk(descriptor)


def fdatasync(descriptor: int) -> None:
    """Sync like `fsync`, without metadata that reading needs not, such as times."""
    if _disk is None:
        os.fdatasync(descriptor)
    else:
        _disk(descriptor)


def fsync_path(path: Path) -> None:
    """Sync a file's content, or a directory's list of names.

    A new or renamed file survives a power failure if both it and its directory were synced.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Sync a directory and everything below it."""
    for path in [*directory.rglob("*"), directory]:
        fsync_path(path)
