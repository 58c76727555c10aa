"""Users of jails: one of its own for each that runs, where the host lets root give them.

Limits, priorities, signals and quotas count by user, and the kernel lets processes of one user
touch each other: jails that share none share nothing of that.
"""

from __future__ import annotations

import os

from meshrl.services.sandbox.jail.confinement import kernel

PLAIN_ID = 64_200  # user and group that own nothing, outside the ranges of distributions
# Above what distributions, systemd and container engines give out (systemd.io/UIDS-GIDS), below
# 2^31. An outer jail takes the block of its process number.
FIRST, OF_ONE, BLOCKS = 1_900_000_000, 4096, 60_000


def given() -> range:
    """Their places in the block of an outer jail; none where we may not give users."""
    top = FIRST + BLOCKS * OF_ONE
    may = os.getuid() == 0 and any(top in each for each in kernel.mapped_users())
    return range(OF_ONE if may else 0)


def block(pid: int) -> int:
    """The first user of the outer jail whose process that is."""
    return FIRST + pid % BLOCKS * OF_ONE


def namespace(plain: int) -> int:
    """A user namespace of the user `plain`, with that user and this process's block mapped.

    Takes root. Returns its descriptor; -1 where the host, as in a container with few ids of its
    own, does not map them: all jails are one user then.
    """
    ready, made = os.pipe()
    wait, over = os.pipe()
    child = os.fork()
    if child == 0:
        kernel.become(plain)
        kernel.unshare(kernel.CLONE_NEWUSER)
        os.write(made, b"y")
        os.close(over)
        os.read(wait, 1)
        os._exit(0)
    os.close(made)
    try:
        if not os.read(ready, 1):
            return -1
        first = block(os.getpid())
        for name in ("uid_map", "gid_map"):
            kernel.write(f"/proc/{child}/{name}", f"{plain} {plain} 1\n{first} {first} {OF_ONE}\n")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    finally:
        for fd in (ready, wait, over):
            os.close(fd)
        os.waitpid(child, 0)


def become_able_to_change(user: int) -> None:
    """Becomes that user, who may become others, and nothing else that root may."""
    kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
    kernel.become(user)
    kernel.keep_capabilities((kernel.CAP_SETGID, kernel.CAP_SETUID))
