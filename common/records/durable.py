"""Durable writes: fsync of files and directories, before a write is acknowledged."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Onto the disk: what a file holds, or which names a directory has. A file that was made or
    renamed is there after a power cut once both it and its directory were synced.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """A directory with all that is below it."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)
