"""Runs a command as an unprivileged user that can reach this checkout and its interpreter.

`python -m tests.unit.sandbox.plain_user COMMAND...`, as root: enters a new mount namespace, mounts
the directories that the command needs and only root can enter, and becomes the user. With
--still-root before the command, the process stays root, and users that it creates can reach them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from meshrl.services.sandbox.jail.confinement import syscalls
from tests.runner import WORKER_ENV

# A separate user for each worker of each of several runs.
FIRST_USER, WORKERS, RUNS = 62_000, 16, 100
ROOT = Path(__file__).parents[3]


def find_inaccessible(path: Path) -> Path | None:
    """Return the first directory on the way to `path` that others may not enter."""
    for parent in [*reversed(path.parents), path]:
        if not parent.stat().st_mode & 0o001:
            return parent
    return None


def choose_user() -> int:
    """Return a user id of this worker only, as process limits count per user."""
    worker = int(os.environ.get(WORKER_ENV, "0")) % WORKERS
    return FIRST_USER + RUNS * worker + os.getpid() % RUNS


def main() -> None:
    needed_paths = {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, ROOT)}
    os.umask(0o022)  # the user must be able to enter the new directories
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    paths_by_blocked_dir: dict[Path, list[Path]] = {}
    for path in needed_paths:
        if (blocked_dir := find_inaccessible(path)) is not None:
            paths_by_blocked_dir.setdefault(blocked_dir, []).append(path)
    syscalls.mount("tmpfs", "/mnt", "tmpfs", 0, "size=64k,mode=755")
    for number, (blocked_dir, paths) in enumerate(paths_by_blocked_dir.items()):
        copy = Path(f"/mnt/{number}")
        copy.mkdir()
        syscalls.mount(str(blocked_dir), str(copy), "", syscalls.MS_BIND | syscalls.MS_REC)
        syscalls.mount("tmpfs", str(blocked_dir), "tmpfs", 0, "size=64k,mode=755")
        for path in paths:
            path.mkdir(parents=True, exist_ok=True)
            path_in_copy = copy / path.relative_to(blocked_dir)
            syscalls.mount(str(path_in_copy), str(path), "", syscalls.MS_BIND | syscalls.MS_REC)
    command = sys.argv[1:]
    if command[0] == "--still-root":
        os.execv(command[1], command[1:])
    os.setgroups([])
    user_id = choose_user()
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
