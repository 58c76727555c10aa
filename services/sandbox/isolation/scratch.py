"""Directories on disk in which jails work, where no mount namespace gives them one in memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import tempfile

from services.sandbox.isolation.users import PLAIN_ID

PREFIX = "meshrl-jail-"


def make(user: int) -> str:
    """A new one; as root, of that user, or with 0 of the one that jails share."""
    place = tempfile.mkdtemp(prefix=PREFIX)
    if os.getuid() == 0:
        os.chown(place, user or PLAIN_ID, user or PLAIN_ID)
    return place


def remove(place: str) -> None:
    """Removes it with all that a jail has left there, whose processes have ended: directories that
    are closed to their owner, and nested deeper than a path is long. Each is brought up to the top.
    """
    mark, numbers = secrets.token_hex(8), itertools.count()
    waiting = [place]
    with contextlib.suppress(OSError):  # a process of the jail's is still writing
        while waiting:
            folder = waiting.pop()
            os.chmod(folder, 0o700)
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)  # one that is closed cannot be moved
                    waiting.append(f"{place}/{mark}{next(numbers)}")
                    os.rename(entry.path, waiting[-1])
                else:
                    os.unlink(entry.path)
            if folder != place:
                os.rmdir(folder)
        os.rmdir(place)
