"""Other processes of the user: their priority, their signals, their limits, their ids.

The first process of a jail is its keeper; where a jail has no process namespace, all others of the
user can be named, too.
"""

from __future__ import annotations

from tests.unit.sandbox.escapes.program import SYSCALL, Escape, tries

# Those of the keeper, and of neighbours by number; a jail that numbers its own has only the first.
OTHERS = """
keeper = os.getppid()
own = os.getpid()
others = [keeper, *([] if keeper == 1 else [n for n in range(max(2, own - 60), own + 8) if n != own])]
def to_any(act):
    done = []
    for number in others:
        try:
            act(number)
            done.append(number)
        except OSError:
            pass
    if not done:
        raise PermissionError("none of %d" % len(others))
    return done
"""  # noqa: E501
RECORD = "import struct\nidle = struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0)\n"

IDENTITY = [
    Escape(
        "priority of others",
        tries(
            "to_any(lambda n: os.setpriority(os.PRIO_PROCESS, n, 19))",
            "to_any(lambda n: os.setpriority(os.PRIO_PGRP, os.getpgid(n), 19))",
            setup=OTHERS,
        ),
    ),
    Escape(
        "scheduler of others",
        tries(
            "to_any(lambda n: os.sched_setscheduler(n, os.SCHED_IDLE, os.sched_param(0)))",
            "to_any(lambda n: called(314, n, idle, 0))",
            setup=SYSCALL + OTHERS + RECORD,
        ),
    ),
    Escape(
        "cores of others",
        tries("to_any(lambda n: os.sched_setaffinity(n, {0}))", setup=OTHERS),
    ),
    Escape(
        "disk priority of others",
        tries(
            "to_any(lambda n: called(251, 1, n, 3 << 13))",
            "to_any(lambda n: called(251, 2, os.getpgid(n), 3 << 13))",
            setup=SYSCALL + OTHERS,
        ),
    ),
    Escape(
        "limits of others",
        tries(
            "to_any(lambda n: resource.prlimit(n, resource.RLIMIT_NOFILE, (3, 3)))",
            "to_any(lambda n: resource.prlimit(n, resource.RLIMIT_NOFILE))",
            setup="import resource\n" + OTHERS,
        ),
    ),
    Escape(
        "signals to others",
        tries(
            "to_any(lambda n: os.kill(n, 0) if n > 1 else called(-1))",
            "to_any(lambda n: called(200, n, 0) if n > 1 else called(-1))",
            "to_any(lambda n: called(234, n, n, 0) if n > 1 else called(-1))",
            setup=SYSCALL + OTHERS,
        ),
    ),
    Escape(
        "handles of others",
        tries("to_any(lambda n: os.pidfd_open(n))", setup=OTHERS),
    ),
    Escape(
        "signals that are queued for the keeper",
        SYSCALL
        + """
import struct
record = struct.pack("iiiiiiQ", 34, 0, -1, 0, os.getpid(), os.getuid(), 1) + bytes(96)
for number in (34, 10, 17, 2, 15, 19, 9):
    for _ in range(2000):
        syscall(129, os.getppid(), number, record)
print("still watched")
""",
        ("ok", "refused"),
    ),
    Escape(
        "signals by descriptors",
        """
import fcntl, os, socket
one, other = socket.socketpair()
for number in (9, 19, 15, 34):
    try:
        fcntl.fcntl(one, fcntl.F_SETOWN, os.getppid())
        fcntl.fcntl(one, 10, number)  # F_SETSIG
        fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        other.send(b"x")
    except OSError as error:
        print("kept in", error)
print("still watched")
""",
        ("ok",),
    ),
    Escape(
        "other users",
        tries(
            "os.setresuid(os.getuid() + 1, -1, -1)",
            "os.setreuid(65534, 65534)",
            "os.setresgid(0, 0, 0)",
            "os.setgroups([os.getgid() + 1])",
            "called(117, 0, 0, 0)",
            setup=SYSCALL,
        ),
    ),
    Escape(
        "privileges back",
        tries(
            "called(126, header, b'\\xff' * 24)",
            "called(157, 47, 2, 21, 0, 0)",
            "called(157, 38, 0, 0, 0, 0)",
            "called(157, 28, 1, 0, 0, 0)",
            setup=SYSCALL + "import struct\nheader = struct.pack('Ii', 0x20080522, 0)\n",
        ),
    ),
    Escape(
        "more of what is first in line",
        tries(
            "os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1)",
            "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
            "os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))",
            "called(251, 1, 0, 1 << 13)",
            "resource.setrlimit(resource.RLIMIT_NICE, (40, 40))",
            "resource.setrlimit(resource.RLIMIT_RTPRIO, (9, 9))",
            "os.write(os.open('/proc/self/autogroup', os.O_WRONLY), b'-20')",
            setup=SYSCALL + "import resource\n",
        ),
    ),
    Escape(
        "limits that children do not inherit",
        """
import resource, subprocess, sys
ask = "import resource as r; print([r.getrlimit(i) for i in (r.RLIMIT_AS, r.RLIMIT_NOFILE, r.RLIMIT_FSIZE)])"
own = str([resource.getrlimit(i) for i in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)])
found = subprocess.run([sys.executable, "-I", "-S", "-c", ask], capture_output=True, text=True)
print("kept in" if found.stdout.strip() == own or found.returncode else "ESCAPED", found.stdout)
""",  # noqa: E501
    ),
    Escape(
        "every limit",
        """
import resource
for which in range(16):
    soft, hard = resource.getrlimit(which)
    try:
        resource.setrlimit(which, (soft, hard + 1))
        print("kept in" if hard == resource.RLIM_INFINITY else "ESCAPED", which, soft, hard)
    except (OSError, ValueError) as error:
        print("kept in", error)
""",
    ),
    Escape(
        "what the keeper's directory takes",
        tries(
            *(
                f"to_any(lambda n: os.open('/proc/%d/{name}' % n, os.O_WRONLY))"
                for name in ("oom_score_adj", "comm", "coredump_filter", "autogroup", "clear_refs")
            ),
            *(
                f"to_any(lambda n: open('/proc/%d/{name}' % n, 'rb').read(1))"
                for name in ("maps", "auxv", "io", "stack", "syscall", "pagemap")
            ),
            setup=OTHERS,
        ),
    ),
]
