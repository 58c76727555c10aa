"""Fork server of a host: it imports the modules that processes need, and forks on request.

Start it by
    python -m meshrl.common.mesh.process.forking.fork_server SOCKET MODULE...

It has one thread and no ZeroMQ context, event loop, process group or CUDA context, so that a fork
is complete. It checks that before it listens. Children belong to their requester
(`fork_client.py`), and survive the fork server. `fork_setup.py` lists what a child shares with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from meshrl.common.mesh.process.entry import guard
from meshrl.common.mesh.process.forking import fork_setup
from meshrl.common.mesh.process.forking.fork_client import (
    MAX_DESCRIPTORS,
    MAX_REQUEST_BYTES,
    ForkRequest,
    is_same_user,
    shorten_socket_path,
)

BACKLOG = 128
# Variables that an interpreter and its libraries read only when they are loaded. A process that
# needs another value than the fork server's is spawned.
LOAD_TIME_PREFIXES = (
    "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_",
    "PYTHON", "PYTORCH_", "TORCH_",
)  # fmt: skip
RESETTABLE_VARIABLES = {fork_setup.THREADS_ENV, "PYTHONPATH", *fork_setup.MALLOPT_PARAMETERS}


class ForkContext(NamedTuple):
    """Request, descriptors and owner's connection of a fork, in the child."""

    request: ForkRequest
    descriptors: Mapping[str, int]
    connection: socket.socket


class ForkServer:
    """Fork server that serves requests at `listener` until the process is ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._environment = select_load_time_variables(os.environ)
        self._connections: dict[int, socket.socket] = {}  # by pid of their child
        self._wakeup_fd, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup_fd, selectors.EVENT_READ)

    def serve(self) -> ForkContext:
        """Serve requests. Returns in a forked child only."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self._selector.unregister(key.fileobj)
                    if (forked := self._fork_requested(key.fileobj)) is not None:
                        # A selector is part of a reference cycle. Its collection would close the
                        # descriptors of its sockets, whose numbers may be reused by then.
                        self._selector.close()
                        for end in (self._listener, *self._connections.values()):
                            end.close()
                        return forked
                else:
                    self._report_exits()

    def _fork_requested(self, connection: socket.socket) -> ForkContext | None:
        """Fork as requested, or answer with the reason for a rejection; return a ForkContext in the
        child.
        """
        descriptors: list[int] = []
        try:
            message, descriptors, _, _ = socket.recv_fds(
                connection, MAX_REQUEST_BYTES, MAX_DESCRIPTORS
            )
            order = ForkRequest.decode(message)
            self._check(order, descriptors, connection)
            pid = os.fork()
        except (OSError, ValueError, TypeError) as error:
            close_descriptors(descriptors)
            send_answer(connection, {"refused": f"{type(error).__name__}: {error}"})
            connection.close()
            return None
        if pid == 0:
            os.setsid()  # a kill of the fork server's group must not reach the child
            passed = dict(zip(order.descriptor_names, descriptors, strict=True))
            about: dict[str, object] = {}
            if order.is_guarded:
                about = {"guard": os.getpid()}
                passed |= insert_guard(order, passed)
            send_answer(connection, {"pid": os.getpid(), **about})
            return ForkContext(order, passed, connection)
        close_descriptors(descriptors)
        self._connections[pid] = connection
        return None

    def _check(
        self, request: ForkRequest, descriptors: list[int], connection: socket.socket
    ) -> None:
        if not is_same_user(connection):
            raise ValueError("the request is from another user")
        if len(descriptors) != len(request.descriptor_names):
            raise ValueError(
                f"{len(descriptors)} descriptors arrived for {request.descriptor_names}"
            )
        if request.executable != sys.executable:
            raise ValueError(f"this interpreter is {sys.executable}")
        requested = select_load_time_variables(request.environment)
        if requested != self._environment:
            differ = sorted(dict(requested.items() ^ self._environment.items()))
            raise ValueError(f"the environment differs from the fork server's: {differ}")

    def _report_exits(self) -> None:
        """Report exit statuses to the owners.

        The remaining processes of a child's session are killed before its pid can be reused.
        """
        os.read(self._wakeup_fd, 1 << 16)
        with contextlib.suppress(ChildProcessError):  # no more children
            while exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                with contextlib.suppress(ProcessLookupError):  # it exited before it had a session
                    os.killpg(exited.si_pid, signal.SIGKILL)
                _, status = os.waitpid(exited.si_pid, 0)
                owner = self._connections.pop(exited.si_pid)
                send_answer(owner, {"status": os.waitstatus_to_exitcode(status)})
                owner.close()


def insert_guard(request: ForkRequest, descriptors: Mapping[str, int]) -> dict[str, int]:
    """Put a guard in front of this process; return its standard streams from now on."""
    signal.set_wakeup_fd(-1)  # the guard, which keeps the pid, handles signals itself
    title = [request.executable, "-m", guard.__name__, request.module]
    writing = guard.fork_guarded(
        descriptors["death"],
        descriptors["stdout"],
        lambda: fork_setup.set_process_title(title, request.environment),
    )
    return {"stdout": writing, "stderr": writing}


def send_answer(connection: socket.socket, answer: Mapping[str, object]) -> None:
    """Send an answer to an owner, unless it has exited."""
    with contextlib.suppress(OSError):
        connection.send(json.dumps(answer).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def close_descriptors(descriptors: list[int]) -> None:
    """Close the descriptors of a request."""
    for descriptor in descriptors:
        os.close(descriptor)


def select_load_time_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that take effect only when a process starts."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(LOAD_TIME_PREFIXES) and name not in RESETTABLE_VARIABLES
    }


def require_forkable() -> None:
    """Raise RuntimeError if an import has started a thread or has begun to use a GPU."""
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(
            f"{len(threads)} threads run: a fork would copy the locks of all, but only one thread"
        )
    torch = sys.modules.get("torch")
    if torch is None:
        return
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    _, status = os.waitpid(child, 0)
    if status or torch.cuda.is_initialized():
        raise RuntimeError("an import has initialized CUDA: a forked process could not use a GPU")


def open_listener(path: Path) -> socket.socket:
    """Open a socket at `path` for this user only, replacing that of an earlier fork server.

    The path appears once the socket listens, so that no client's connection is refused.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.umask(0o177)
    try:
        listener.bind(shorten_socket_path(new, directory))
    finally:
        os.umask(before)
        os.close(directory)
    listener.listen(BACKLOG)
    new.replace(path)
    return listener


def main(path: Path, modules: list[str]) -> None:
    """Import the modules, then serve at `path` until the process is ended."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [place for place in sys.path[1:] if place not in own]
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    require_forkable()
    # Exit finalizers of imports belong to this process, not to its children: other processes still
    # use a temporary directory. (PyTorch's operators take 30 ms of CPU.)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # imports stay, and no collection in a child touches their pages
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))  # each child takes one
    forked = ForkServer(open_listener(path)).serve()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os._exit(fork_setup.run_forked(*forked, paths))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
