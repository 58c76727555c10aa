"""Files whose locks say that a process uses what lies beside them: a lock ends with its process,
and whoever takes things away does so under the lock alone.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def try_lock_file(path: Path, create: bool = False) -> Iterator[bool]:
    """Whether nobody holds the lock of the file that lies there; then nobody gets it until the end.
    False too where there is no such file; `create`: then it is made.
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
    """Whether the lock of an open file is this process's alone now; it does not wait."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_file_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that lies there now: whoever waited for a lock may have that
    of a file which was taken away meanwhile.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
