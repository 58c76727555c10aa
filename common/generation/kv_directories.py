"""Where engines of a host keep keys and values that their caches have no room for: a directory a
job, in memory and on the disk; and how what nobody uses any more goes.
"""

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
MEMORY_DIRECTORY_PREFIX = "meshrl-kv-"  # begins the names of what hosts keep there
MAX_MEMORY_DIRECTORIES = 16  # that a host may have there: another user can take some of them first
LOCK_FILE = ".engines"  # in a directory: its engines hold this file's lock
DISK_DIRECTORY = "kv"  # on the disk, below the root of a host's runs


def get_memory_root(run_root: str) -> Path:
    """The directory below which a host keeps them in memory: the first of several names that is
    this user's, else the first that is free. Every user may make directories there.
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
    """Below which it keeps them on a disk; `path`: another place than that of its runs."""
    return Path(path).expanduser() if path else Path(run_root) / DISK_DIRECTORY


def make_private_directory(path: Path) -> Path:
    """A directory that nobody else can read; ConfigError if another user has made it."""
    with suppress(FileExistsError):  # a file, or a link to what is not there
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(path):
        raise ConfigError(
            "keys and values would lie where others can read or change them",
            where=str(path),
            fix=f"chown it to user {os.geteuid()} and chmod 700, or remove it",
        )
    return path


def is_private(path: Path) -> bool:
    """True if a directory is this user's alone."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o77


def remove_abandoned(run_root: str) -> None:
    """Removes the directories of engines that were killed; in memory, where what a whole mesh left
    would fill the host, those of this user's other roots too.
    """
    roots = [root for root in SHARED_MEMORY.glob(f"{MEMORY_DIRECTORY_PREFIX}*") if is_private(root)]
    for root in (*roots, get_disk_root(run_root, "")):
        for directory in root.glob("*"):
            release_directory(directory)


def acquire_directory(directory: Path) -> tuple[int, bool]:
    """Uses a directory from now on, which is there then, until what it returns is given to `leave`;
    and whether no other engine does so.
    """
    while True:
        make_private_directory(directory.parent)
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(
                directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        except FileNotFoundError:  # the last one left at this moment
            continue
        alone = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            alone = False
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if is_file_at(descriptor, directory / LOCK_FILE):
            return descriptor, alone
        os.close(descriptor)  # the last one has left meanwhile, and taken it away


def downgrade_lock(directory: Path, descriptor: int) -> bool:
    """Lets others in, after what the first one had to do alone; whether the directory is still
    there: for a moment nobody has its lock.
    """
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return is_file_at(descriptor, directory / LOCK_FILE)


def release_directory(directory: Path, descriptor: int | None = None) -> bool:
    """Uses a directory no more; whether it is gone, because nobody else does."""
    if descriptor is not None:
        os.close(descriptor)
    with try_lock_file(directory / LOCK_FILE) as nobody:
        if not nobody:
            return False
        try:
            # The lock's file last: who comes meanwhile waits for it.
            for path in directory.iterdir():
                if path.name == LOCK_FILE:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            (directory / LOCK_FILE).unlink()
            directory.rmdir()
            with suppress(OSError):  # other jobs of the host have theirs there
                directory.parent.rmdir()
        except OSError:
            return False
        return True
