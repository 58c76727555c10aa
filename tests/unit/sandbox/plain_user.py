"""Runs a command as a plain user who can reach this checkout and its interpreter.

`python -m tests.unit.sandbox.plain_user COMMAND...`, as root: in a mount namespace of its own it
shows what the command needs through directories that only root may enter, and becomes the user.
With --still-root before the command it stays root, and users that it makes can reach all that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from meshrl.services.sandbox.jail.confinement import syscalls
from tests.runner import WORKER_ENV

FIRST_USER, WORKERS, RUNS = 62_000, 16, 100  # a user for each worker of each of several runs
ROOT = Path(__file__).parents[3]


def barred(path: Path) -> Path | None:
    """The first directory on the way to `path` that others may not enter."""
    for parent in [*reversed(path.parents), path]:
        if not parent.stat().st_mode & 0o001:
            return parent
    return None


def user() -> int:
    """Workers of one run have users of their own, as a limit of processes counts a user's."""
    worker = int(os.environ.get(WORKER_ENV, "0")) % WORKERS
    return FIRST_USER + RUNS * worker + os.getpid() % RUNS


def main() -> None:
    needed = {Path(place).resolve() for place in (sys.base_prefix, sys.prefix, ROOT)}
    os.umask(0o022)  # the user must be able to enter what is made here
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    hidden: dict[Path, list[Path]] = {}
    for place in needed:
        if (bar := barred(place)) is not None:
            hidden.setdefault(bar, []).append(place)
    syscalls.mount("tmpfs", "/mnt", "tmpfs", 0, "size=64k,mode=755")
    for number, (bar, places) in enumerate(hidden.items()):
        kept = Path(f"/mnt/{number}")
        kept.mkdir()
        syscalls.mount(str(bar), str(kept), "", syscalls.MS_BIND | syscalls.MS_REC)
        syscalls.mount("tmpfs", str(bar), "tmpfs", 0, "size=64k,mode=755")
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
            inside = kept / place.relative_to(bar)
            syscalls.mount(str(inside), str(place), "", syscalls.MS_BIND | syscalls.MS_REC)
    command = sys.argv[1:]
    if command[0] == "--still-root":
        os.execv(command[1], command[1:])
    os.setgroups([])
    plain = user()
    os.setresgid(plain, plain, plain)
    os.setresuid(plain, plain, plain)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
