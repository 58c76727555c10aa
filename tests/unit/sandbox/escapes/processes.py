"""Bombs, daemons, and signals to whom they are not due."""

from __future__ import annotations

from tests.unit.sandbox.escapes.program import SPENT, SYSCALL, Escape

PROCESSES = [
    Escape("fork bomb", "import os\nwhile True:\n    os.fork()", SPENT),
    Escape(
        "fork bomb that goes on",
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        SPENT,
    ),
    Escape("shell bomb", "b() { b | b & }; b; sleep 100", mode="shell"),
    Escape(
        "thread bomb",
        """
import threading, time
for _ in range(10_000):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print("ESCAPED")
""",
        SPENT,
    ),
    Escape(
        "daemon that outlives",
        """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        time.sleep(600)
    os._exit(0)
print("parent ends")
""",
    ),
    Escape(
        "kill everybody",
        """
import os, signal
try:
    os.kill(-1, signal.SIGKILL)
except OSError as error:
    print("kept in", error)
""",
    ),
    Escape(
        "kill the keeper",
        """
import os, signal
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGCHLD):
    try:
        os.kill(1, number)
    except OSError as error:
        print("kept in", error)
print("still watched")
""",
    ),
    Escape(
        "become root",
        """
import os
for change in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0])):
    try:
        change()
        print("ESCAPED")
    except OSError as error:
        print("kept in", error)
""",
    ),
    Escape("su", "su -c 'echo ESCAPED' </dev/null; /bin/mount && echo", mode="shell"),
    Escape(
        "trace the keeper",
        SYSCALL
        + "\nresult = syscall(101, 16, 1, 0, 0)\nprint('ESCAPED' if result >= 0 else result)",
    ),
    Escape(
        "raise own limits",
        """
import resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC):
    soft, hard = resource.getrlimit(which)
    try:
        resource.setrlimit(which, (hard + 1, hard + 1))
        print("ESCAPED")
    except (ValueError, OSError) as error:
        print("kept in", error)
""",
    ),
    Escape(
        "take limits from the keeper",
        """
import resource
try:
    resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))
    print("ESCAPED")
except OSError as error:
    print("kept in", error)
""",
    ),
]

SIGNALS = [
    Escape(
        "ignore all",
        """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
""",
        ("timeout",),
    ),
    Escape(
        "block all",
        """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    pass
""",
        ("timeout",),
    ),
    Escape(
        "stop itself",
        "import os\nos.kill(os.getpid(), 19)\nprint('on')",
        ("timeout", "ok"),
    ),
    Escape("kill itself", "import os\nos.kill(os.getpid(), 9)", ("crashed",)),
    Escape("segmentation fault", "import ctypes\nctypes.string_at(0)", ("crashed",)),
    Escape("abort", "import os\nos.abort()", ("crashed",)),
    Escape(
        "storm",
        """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: None)
while True:
    os.kill(os.getpid(), signal.SIGUSR1)
    try:
        os.kill(1, signal.SIGCHLD)
    except OSError:
        pass
""",
        ("timeout",),
    ),
    Escape(
        "group",
        "import os, signal\nos.killpg(0, signal.SIGKILL)\nprint('on')",
        ("crashed", "ok"),
    ),
    Escape(
        "from program to program",
        """
import os, sys
os.execv(sys.executable, [sys.executable, "-I", "-S", "-c",
    "import os, sys; os.execv(sys.executable, sys.orig_argv)"])
""",
        ("timeout", "crashed"),
    ),
    Escape(
        "dump of its memory",
        """
import os, resource
for size in (1, 4096, -1):
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (size, size))
        print("ESCAPED")
    except (OSError, ValueError) as error:
        print("kept in", error)
print(os.listdir("."), flush=True)
os.abort()
""",
        ("crashed",),
    ),
    Escape(
        "parents that go",
        """
import os, time
for _ in range(40):
    if os.fork() == 0:
        try:
            os.setsid()
        except OSError:
            pass
        time.sleep(0.002)
        continue
    os._exit(0)
time.sleep(60)
""",
    ),
]
