"""Directories on disk in which jails work, where no mount namespace gives them one in memory."""

from __future__ import annotations

import os
import secrets
import tempfile

from services.sandbox.isolation.resources.users import PLAIN_ID

PREFIX = "meshrl-jail-"
DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make(user: int) -> str:
    """A new one; as root, of that user, or with 0 of the one that jails share."""
    place = tempfile.mkdtemp(prefix=PREFIX)
    if os.getuid() == 0:
        os.chown(place, user or PLAIN_ID, user or PLAIN_ID)
    return place


def remove(place: str) -> bool:
    """Removes it with all that a program has left there, however deep, closed or named; False if
    somebody still writes there, or it is not ours.

    Each directory is moved up before its content is looked at, so that neither the length of a path
    nor the depth of a recursion bounds what can be removed. No link is followed, as the program's
    last processes may still be there to place some.
    """
    mark, number = secrets.token_hex(8), 0
    pending = [""]
    try:
        top = os.open(place, DIRECTORY)
    except OSError:
        return not os.path.lexists(place)
    try:
        os.chmod(f"/proc/self/fd/{top}", 0o700)
        while pending:
            name = pending.pop()
            folder = os.open(name or ".", DIRECTORY, dir_fd=top)
            try:
                opened = f"/proc/self/fd/{folder}"
                os.chmod(opened, 0o700)
                for entry in os.listdir(os.fsencode(opened)):
                    moved = f"{mark}-{number}"
                    if _moved_up(folder, entry, top, moved):
                        pending.append(moved)
                        number += 1
            finally:
                os.close(folder)
            if name:
                os.rmdir(name, dir_fd=top)
        os.rmdir(place)
    except OSError:
        return False
    finally:
        os.close(top)
    return True


def _moved_up(folder: int, entry: bytes, top: int, name: str) -> bool:
    """Moves a directory to the top; removes anything else, and says so."""
    try:
        below = os.open(entry, DIRECTORY, dir_fd=folder)
    except NotADirectoryError:
        os.unlink(entry, dir_fd=folder)
        return False
    try:
        os.chmod(f"/proc/self/fd/{below}", 0o700)  # to be moved is to be written
    finally:
        os.close(below)
    os.rename(entry, name, src_dir_fd=folder, dst_dir_fd=top)
    return True
