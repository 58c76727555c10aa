"""Lock files: a lock shows that a process uses the files beside it, and ends with that process.

A process deletes such files only while it holds the lock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def try_lock_file(path: Path, create: bool = False) -> Iterator[bool]:
    """Yield True if the lock of the file is free, and hold it until the end of the block.

    Yield False if the file is missing; `create` creates it.
    """
    try:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        yield False
        return
    try:
        yield try_lock(descriptor) and is_file_at(descriptor, path)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Return True if this process gets the exclusive lock of an open file, without waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_file_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file is still the one at `path`.

    A process that waited for a lock may have that of a deleted file.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
