"""What a forked process sets anew before it becomes a program, so that it is what a fresh
interpreter would be: it shares with its nursery imported modules and nothing else.

Not set anew, because only `exec` reads it: hash randomisation, the number of threads of NumPy's
BLAS (one), resource limits, the control group.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import random
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

from meshrl.common.mesh.process.ends import failure, limits
from meshrl.common.mesh.process.entry.child import CHANNEL_FD, ORPHANED, PRIVATE, end_with
from meshrl.common.mesh.process.forking.birth import GO, ForkOrder
from meshrl.common.mesh.process.output.streams import outlive_a_full_disk

MALLOPT = {  # glibc reads these when a program starts; afterwards they are set by number
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_ARENA_MAX": -8,
}
THREADS = "OMP_NUM_THREADS"
ARGUMENTS, ENVIRONMENT = 45, 47  # fields of /proc/PID/stat after the name: start and end of each


def become(
    order: ForkOrder, descriptors: Mapping[str, int], connection: socket.socket, paths: list[str]
) -> int:
    """Runs the order's module in this process, which has just been forked; its exit status."""
    settle_descriptors(descriptors, connection)
    # Every signal does what it does in a fresh interpreter, and none is blocked.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if not let_go(connection):
        return ORPHANED
    connection.close()
    environment = dict(order.environment)
    if "channel" in descriptors:
        environment[CHANNEL_FD] = str(descriptors["channel"])
    settle_environment(order, environment, paths)
    settle_libraries(environment)
    outlive_a_full_disk()
    return run(order.module, order.arguments)


def let_go(connection: socket.socket) -> bool:
    """Waits for the owner's word; False when it has ended, or has given the process up."""
    try:
        return connection.recv(len(GO)) == GO
    except ConnectionResetError:  # it ended before it had read that there is a process
        return False


def settle_descriptors(descriptors: Mapping[str, int], connection: socket.socket) -> None:
    """Ties the process to its owner, and closes everything that was not passed to it."""
    os.fchdir(descriptors["cwd"])
    kept = {0, 1, 2, connection.fileno(), descriptors.get("channel", 0)}
    if "death" in descriptors:
        kept.add(end_with(descriptors["death"]))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(descriptors["stdout"], 1)
    os.dup2(descriptors["stderr"], 2)
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):  # that of the listing itself
            os.close(number)
    for number in kept - {0, 1, 2}:
        os.set_inheritable(number, False)


def settle_environment(order: ForkOrder, environment: Mapping[str, str], paths: list[str]) -> None:
    """Environment, module path, niceness, file mode, and what `ps` shows."""
    os.environ.clear()  # unset in C too, where others would point into what `show` overwrites
    os.environ.update(environment)
    inherited = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [os.getcwd(), *inherited, *paths]
    os.umask(PRIVATE)
    os.setpriority(os.PRIO_PROCESS, 0, order.niceness)
    show([order.executable, "-m", order.module, *order.arguments], environment)


def show(argv: list[str], environment: Mapping[str, str]) -> None:
    """Writes command line and environment where the kernel reads them for /proc, as far as there is
    room; ours first, because a mesh finds its processes by them.
    """
    stat = Path("/proc/self/stat").read_text()
    fields = [int(field) for field in stat[stat.rindex(")") + 4 :].split()]
    ours = sorted(environment.items(), key=lambda item: not item[0].startswith("MESHRL_"))
    overwrite(fields, ARGUMENTS - 1, argv)
    overwrite(fields, ENVIRONMENT - 1, [f"{name}={value}" for name, value in ours])


def overwrite(fields: list[int], which: int, words: Iterable[str]) -> None:
    """Puts words, each ended by a zero, into the memory between two addresses."""
    start, end = fields[which], fields[which + 1]
    content = b""
    for word in words:
        ended = os.fsencode(word) + b"\0"
        if len(content) + len(ended) < end - start:
            content += ended
    ctypes.memmove(start, content, len(content))
    ctypes.memset(start + len(content), 0, end - start - len(content))


def settle_libraries(environment: Mapping[str, str]) -> None:
    """What libraries read of the environment when they were loaded; random numbers."""
    libc = ctypes.CDLL(None)
    for name, parameter in MALLOPT.items():
        if name in environment and hasattr(libc, "mallopt"):
            libc.mallopt(parameter, int(environment[name]))
    random.seed()
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed()
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(int(environment.get(THREADS, 0)) or limits.cores())
        torch.default_generator.seed()


def run(module: str, arguments: list[str]) -> int:
    """Runs a module as a program to its very end, as the interpreter does; its exit status."""
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    gc.enable()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        failure.leave(end)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        failure.leave(error)
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return code & 0xFF
