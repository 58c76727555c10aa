"""Directories of a host's KV tiers, in memory and on disk, one for each job, and their removal."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.files.file_locks import is_file_at, try_lock_file

SHARED_MEMORY = Path("/dev/shm")
MEMORY_DIRECTORY_PREFIX = "meshrl-kv-"  # prefix of directory names
MAX_MEMORY_DIRECTORIES = 16  # names per host, because another user can take some of them first
LOCK_FILE = ".engines"  # in each directory: its engines hold this file's lock
DISK_DIRECTORY = "kv"  # on the disk, below the root of a host's runs


def get_memory_root(run_root: str) -> Path:
    """Return the directory for KV tiers in memory.

    It is the first of several names that belongs to this user, else the first free one. All users
    may create directories in its parent.
    """
    about = f"{os.geteuid()} {Path(run_root).resolve()}"
    digests = (
        blake2b(f"{about} {n}".encode(), digest_size=8).hexdigest()
        for n in range(MAX_MEMORY_DIRECTORIES)
    )
    names = [SHARED_MEMORY / f"{MEMORY_DIRECTORY_PREFIX}{digest}" for digest in digests]
    own = (name for name in names if is_private(name))
    free = (name for name in names if not os.path.lexists(name))
    return next(own, None) or next(free, names[0])


def get_disk_root(run_root: str, path: str) -> Path:
    """Return the directory for KV tiers on disk; `path` replaces the root of the host's runs."""
    return Path(path).expanduser() if path else Path(run_root) / DISK_DIRECTORY


def make_private_directory(path: Path) -> Path:
    """Create a directory that no other user can read.

    Raise ConfigError if it belongs to another.
    """
    with suppress(FileExistsError):  # a file, or a broken link
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(path):
        raise ConfigError(
            "other users can read or change this directory for keys and values",
            where=str(path),
            fix=f"Run chown to user {os.geteuid()} and chmod 700 on it, or remove it",
        )
    return path


def is_private(path: Path) -> bool:
    """Return True if a directory belongs to this user and no other user has access."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o77


def remove_abandoned(run_root: str) -> None:
    """Remove the directories of killed engines.

    In memory, also remove those below this user's other run roots: the remains of a whole mesh
    would fill the host.
    """
    roots = [root for root in SHARED_MEMORY.glob(f"{MEMORY_DIRECTORY_PREFIX}*") if is_private(root)]
    for root in (*roots, get_disk_root(run_root, "")):
        for directory in root.glob("*"):
            release_directory(directory)


def acquire_directory(directory: Path) -> tuple[int, bool]:
    """Acquire a directory, created if needed, until `release_directory`.

    Return its lock and True if no other engine uses it.
    """
    while True:
        make_private_directory(directory.parent)
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(
                directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        except FileNotFoundError:  # the last engine removed the directory at this moment
            continue
        alone = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            alone = False
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if is_file_at(descriptor, directory / LOCK_FILE):
            return descriptor, alone
        os.close(descriptor)  # the last engine has removed the directory since


def downgrade_lock(directory: Path, descriptor: int) -> bool:
    """Downgrade the exclusive lock after the first engine's set-up, so that others can enter.

    Return True if the directory still exists: for a moment no process has its lock.
    """
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return is_file_at(descriptor, directory / LOCK_FILE)


def release_directory(directory: Path, descriptor: int | None = None) -> bool:
    """Release a directory; return True if it was removed because no other engine uses it."""
    if descriptor is not None:
        os.close(descriptor)
    with try_lock_file(directory / LOCK_FILE) as nobody:
        if not nobody:
            return False
        try:
            # Remove the lock file last: an engine that arrives during the removal waits for it.
            for path in directory.iterdir():
                if path.name == LOCK_FILE:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            (directory / LOCK_FILE).unlink()
            directory.rmdir()
            with suppress(OSError):  # other jobs of the host have directories there
                directory.parent.rmdir()
        except OSError:
            return False
        return True
