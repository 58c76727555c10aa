"""Durable writes: fsync of files and directories, before a write is acknowledged."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Writes a file's content, or a directory's list of names, to the disk. After a power cut a new
    or renamed file is there if both it and its directory were synced.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Syncs a directory and all that is below it."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)
