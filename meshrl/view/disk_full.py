"""Messages about a full disk of a run: which disk, and how to recover."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from meshrl.common.base.errors import StorageFull

MIN_FREE_BYTES = 1 << 20  # less than a segment of a ledger or a chunk of weights takes at once


def measure_free_bytes(path: Path) -> int:
    """Return the bytes that this user can still write there. Raises OSError if the path does not
    exist.
    """
    found = os.statvfs(path)
    blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return blocks * found.f_frsize


def find_full_disk(paths: Iterable[Path]) -> str:
    """Return the message for the first directory on a full disk; empty if none is full."""
    for path in paths:
        try:
            free = measure_free_bytes(path)
        except OSError:  # the path no longer exists, which is another error
            continue
        if free < MIN_FREE_BYTES:
            return describe_full_disk(path, free)
    return ""


def describe_full_disk(path: Path, free_bytes: int = 0) -> str:
    """Return the message for a disk on which a write has failed."""
    return (
        f"the disk of {path} is full ({free_bytes // 1024} KiB are free). Free disk space "
        "there: all processes wait, and continue on their own."
    )


def describe_rejected_write(error: StorageFull, default_path: Path) -> str:
    """Return the message for a write that a full disk has rejected: the file and the bytes it
    needs.
    """
    where = Path(error.where or default_path)
    return f"{describe_full_disk(where.parent)} {where}: {error.message}."
