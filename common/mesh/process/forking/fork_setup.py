"""Set-up of a forked process before it runs its program, as in a fresh interpreter.

It shares only imported modules with its fork server. Settings that only `exec` reads stay: hash
randomisation, the number of threads of NumPy's BLAS (one), resource limits, the control group.
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

from meshrl.common.mesh.process.diagnosis import failure, host_limits
from meshrl.common.mesh.process.entry.child import (
    CHANNEL_FD,
    ORPHANED_EXIT_STATUS,
    PRIVATE_UMASK,
    die_with_pipe,
)
from meshrl.common.mesh.process.forking.fork_client import START_MESSAGE, ForkRequest
from meshrl.common.mesh.process.output.streams import install_lossy_output

MALLOPT_PARAMETERS = {  # glibc reads these when a program starts; later they are set by number
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_ARENA_MAX": -8,
}
THREADS_ENV = "OMP_NUM_THREADS"
ARGUMENTS_FIELD, ENVIRONMENT_FIELD = (
    45,
    47,
)  # fields of /proc/PID/stat after the name: start and end of each


def run_forked(
    request: ForkRequest,
    descriptors: Mapping[str, int],
    connection: socket.socket,
    paths: list[str],
) -> int:
    """Run the request's module in this process, a fresh fork, and return its exit status."""
    reset_descriptors(descriptors, connection)
    # Every signal has the handler of a fresh interpreter, and none is blocked.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if not wait_for_start(connection):
        return ORPHANED_EXIT_STATUS
    connection.close()
    environment = dict(request.environment)
    if "channel" in descriptors:
        environment[CHANNEL_FD] = str(descriptors["channel"])
    reset_environment(request, environment, paths)
    reset_libraries(environment)
    install_lossy_output()
    return run_module(request.module, request.arguments)


def wait_for_start(connection: socket.socket) -> bool:
    """Wait for the owner's go; return False if the owner has exited or closed the connection."""
    try:
        return connection.recv(len(START_MESSAGE)) == START_MESSAGE
    except ConnectionResetError:  # it exited before it read the pid
        return False


def reset_descriptors(descriptors: Mapping[str, int], connection: socket.socket) -> None:
    """Tie the process to its owner, and close all descriptors that were not passed to it."""
    os.fchdir(descriptors["cwd"])
    retained = {0, 1, 2, connection.fileno(), descriptors.get("channel", 0)}
    if "death" in descriptors:
        retained.add(die_with_pipe(descriptors["death"]))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(descriptors["stdout"], 1)
    os.dup2(descriptors["stderr"], 2)
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - retained:
        with contextlib.suppress(OSError):  # the descriptor of the listing
            os.close(number)
    for number in retained - {0, 1, 2}:
        os.set_inheritable(number, False)


def reset_environment(
    request: ForkRequest, environment: Mapping[str, str], paths: list[str]
) -> None:
    """Set the environment, module path, niceness, file mode, and the title that `ps` shows."""
    os.environ.clear()  # also in C, whose pointers lead into memory that the title overwrites
    os.environ.update(environment)
    inherited = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [os.getcwd(), *inherited, *paths]
    os.umask(PRIVATE_UMASK)
    os.setpriority(os.PRIO_PROCESS, 0, request.niceness)
    set_process_title([request.executable, "-m", request.module, *request.arguments], environment)


def set_process_title(argv: list[str], environment: Mapping[str, str]) -> None:
    """Write command line and environment where the kernel reads them for /proc, as far as they fit.

    MESHRL variables come first, because a mesh finds its processes by them.
    """
    stat = Path("/proc/self/stat").read_text()
    fields = [int(field) for field in stat[stat.rindex(")") + 4 :].split()]
    ours = sorted(environment.items(), key=lambda item: not item[0].startswith("MESHRL_"))
    overwrite_words(fields, ARGUMENTS_FIELD - 1, argv)
    overwrite_words(fields, ENVIRONMENT_FIELD - 1, [f"{name}={value}" for name, value in ours])


def overwrite_words(fields: list[int], index: int, words: Iterable[str]) -> None:
    """Write words, each ended by a zero byte, into the memory between two addresses."""
    start, end = fields[index], fields[index + 1]
    content = b""
    for word in words:
        terminated = os.fsencode(word) + b"\0"
        if len(content) + len(terminated) < end - start:
            content += terminated
    ctypes.memmove(start, content, len(content))
    ctypes.memset(start + len(content), 0, end - start - len(content))


def reset_libraries(environment: Mapping[str, str]) -> None:
    """Apply the variables that libraries read when they were loaded; seed random numbers."""
    libc = ctypes.CDLL(None)
    for name, parameter in MALLOPT_PARAMETERS.items():
        if name in environment and hasattr(libc, "mallopt"):
            libc.mallopt(parameter, int(environment[name]))
    random.seed()
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed()
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(
            int(environment.get(THREADS_ENV, 0)) or host_limits.count_usable_cores()
        )
        torch.default_generator.seed()


def run_module(module: str, arguments: list[str]) -> int:
    """Run a module as a program, including exit functions, and return its exit status."""
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    gc.enable()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        failure.write_failure(end)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        failure.write_failure(error)
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return code & 0xFF
