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
from meshrl.common.base.files.file_locks import lies_at, unheld

SHARED_MEMORY = Path("/dev/shm")
IN_MEMORY = "meshrl-kv-"  # begins the names of what hosts keep there
NAMES = 16  # that a host may have there: another user can take some of them first
ENGINES = ".engines"  # in a directory: its engines hold this file's lock
KV = "kv"  # on the disk, below the root of a host's runs


def memory_root(run_root: str) -> Path:
    """The directory below which a host keeps them in memory: the first of several names that is
    this user's, else the first that is free. Every user may make directories there.
    """
    about = f"{os.geteuid()} {Path(run_root).resolve()}"
    digests = (blake2b(f"{about} {n}".encode(), digest_size=8).hexdigest() for n in range(NAMES))
    names = [SHARED_MEMORY / f"{IN_MEMORY}{digest}" for digest in digests]
    own = (name for name in names if is_private(name))
    free = (name for name in names if not os.path.lexists(name))
    return next(own, None) or next(free, names[0])


def disk_root(run_root: str, path: str) -> Path:
    """Below which it keeps them on a disk; `path`: another place than that of its runs."""
    return Path(path).expanduser() if path else Path(run_root) / KV


def own_directory(path: Path) -> Path:
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


def sweep(run_root: str) -> None:
    """Removes the directories of engines that were killed; in memory, where what a whole mesh left
    would fill the host, those of this user's other roots too.
    """
    roots = [root for root in SHARED_MEMORY.glob(f"{IN_MEMORY}*") if is_private(root)]
    for root in (*roots, disk_root(run_root, "")):
        for directory in root.glob("*"):
            leave(directory)


def enter(directory: Path) -> tuple[int, bool]:
    """Uses a directory from now on, which is there then, until what it returns is given to `leave`;
    and whether no other engine does so.
    """
    while True:
        own_directory(directory.parent)
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(directory / ENGINES, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the last one left at this moment
            continue
        alone = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            alone = False
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if lies_at(descriptor, directory / ENGINES):
            return descriptor, alone
        os.close(descriptor)  # the last one has left meanwhile, and taken it away


def entered(directory: Path, descriptor: int) -> bool:
    """Lets others in, after what the first one had to do alone; whether the directory is still
    there: for a moment nobody has its lock.
    """
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return lies_at(descriptor, directory / ENGINES)


def leave(directory: Path, descriptor: int | None = None) -> bool:
    """Uses a directory no more; whether it is gone, because nobody else does."""
    if descriptor is not None:
        os.close(descriptor)
    with unheld(directory / ENGINES) as nobody:
        if not nobody:
            return False
        try:
            # The lock's file last: who comes meanwhile waits for it.
            for path in directory.iterdir():
                if path.name == ENGINES:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            (directory / ENGINES).unlink()
            directory.rmdir()
            with suppress(OSError):  # other jobs of the host have theirs there
                directory.parent.rmdir()
        except OSError:
            return False
        return True
