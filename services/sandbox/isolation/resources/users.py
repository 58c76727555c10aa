"""Users of jails: one of its own for each running jail, where the host lets root assign them.

Limits, priorities, signals and quotas count by user, and the kernel lets processes of one user
access each other. Jails with different users are separate in all of these.
"""

from __future__ import annotations

import os

from meshrl.services.sandbox.jail.confinement import syscalls

PLAIN_ID = 64_200  # user and group that own nothing, outside the ranges of distributions
# Above the ranges of distributions, systemd and container engines (systemd.io/UIDS-GIDS), below
# 2^31. An outer jail takes the block of its process number.
FIRST_USER_ID, USERS_PER_BLOCK, BLOCKS = 1_900_000_000, 4096, 60_000


def available_indices() -> range:
    """Return the indices of jail users in the block of an outer jail; empty without the right to
    users.
    """
    top = FIRST_USER_ID + BLOCKS * USERS_PER_BLOCK
    may = os.getuid() == 0 and any(top in each for each in syscalls.list_mapped_users())
    return range(USERS_PER_BLOCK if may else 0)


def first_user_id(pid: int) -> int:
    """Return the first user of the outer jail with that pid."""
    return FIRST_USER_ID + pid % BLOCKS * USERS_PER_BLOCK


def create_user_namespace(user_id: int) -> int:
    """Create a user namespace of the plain user, with that user and this process's block mapped.

    Needs root. Returns its descriptor, or -1 where the host does not map them, as in a container
    with few ids of its own. All jails are one user then.
    """
    ready, ready_writer = os.pipe()
    wait, over = os.pipe()
    child = os.fork()
    if child == 0:
        syscalls.switch_user(user_id)
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        os.write(ready_writer, b"y")
        os.close(over)
        os.read(wait, 1)
        os._exit(0)
    os.close(ready_writer)
    try:
        if not os.read(ready, 1):
            return -1
        first = first_user_id(os.getpid())
        for name in ("uid_map", "gid_map"):
            syscalls.write_file(
                f"/proc/{child}/{name}",
                f"{user_id} {user_id} 1\n{first} {first} {USERS_PER_BLOCK}\n",
            )
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    finally:
        for fd in (ready, wait, over):
            os.close(fd)
        os.waitpid(child, 0)


def switch_user_keep_setuid(user_id: int) -> None:
    """Switch to that user, with the right to switch to others, and no other right of root."""
    syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)
    syscalls.switch_user(user_id)
    syscalls.retain_capabilities((syscalls.CAP_SETGID, syscalls.CAP_SETUID))
