"""Ownership of a mesh's files: its directories are private, and other users' files are rejected."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from meshrl.common.base.errors import Refused
from meshrl.common.mesh.process.entry.child import PRIVATE_UMASK

WORLD_WRITABLE = stat.S_IWOTH


def create_private_directory(directory: Path) -> None:
    """Create a directory that this user alone can enter, or close it to others.

    Raises Refused when it is another user's, or when any user may put another one in its place.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o777 & ~PRIVATE_UMASK)
    require_own_file(directory)
    parent_stat = directory.parent.stat()
    if parent_stat.st_mode & WORLD_WRITABLE and not parent_stat.st_mode & stat.S_ISVTX:
        raise Refused(
            f"every user can replace {directory.name} in {directory.parent}",
            where=str(directory),
            fix=f"Run `chmod o-w {directory.parent}`, or use another directory",
        )
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & PRIVATE_UMASK:
        directory.chmod(mode & ~PRIVATE_UMASK)


def require_own_file(path: Path) -> None:
    """Raise Refused when `path` belongs to another user.

    Such a file could name any server and any process. A file of root's is trusted.
    """
    owner = path.lstat().st_uid
    if owner not in (0, os.geteuid()):
        raise Refused(
            f"{path} belongs to user {owner}, not to you ({os.geteuid()})",
            fix="Run the command as that user, or remove the file if it is unknown to you",
        )
