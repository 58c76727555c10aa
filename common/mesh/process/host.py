"""Host interface: every use of processes, threads and files goes through `Host`, so that tests can
simulate it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.base.files.disk_sync import fsync, fsync_path
from meshrl.common.mesh.process import mesh_processes
from meshrl.common.mesh.process.child_handle import ChildProcess, SystemChild, read_start_time
from meshrl.common.mesh.process.diagnosis import failure, host_limits
from meshrl.common.mesh.process.diagnosis.failure import FAILURE_ENV, Failure, failure_path
from meshrl.common.mesh.process.diagnosis.host_limits import FreeSpace
from meshrl.common.mesh.process.entry.child import CHANNEL_FD
from meshrl.common.mesh.process.processor_usage import (
    ProcessorUsage,
    measure_process_usage,
    measure_processors,
)
from meshrl.common.mesh.process.spawning import DEFAULT_OPTIONS, Spawner, SpawnOptions, SpawnRequest

T = TypeVar("T")
BLOCKING_THREADS = 32  # enough for every file of a process; a stuck one holds its thread


class Stoppable(Protocol):
    """Task that runs until it is stopped."""

    def stop(self) -> None:
        """Stop the task; a call in progress still finishes."""


class Host(Protocol):
    """Operating system services of a process, provided by the machine or a simulation."""

    def spawn(
        self,
        argv: list[str],
        *,
        name: str,
        env: Mapping[str, str] = {},
        log: Path | None = None,
        options: SpawnOptions = DEFAULT_OPTIONS,
    ) -> ChildProcess:
        """Start a process, from the main thread.

        `argv` of `[sys.executable, "-m", module, ...]` runs the module in a fork of the fork server
        that $MESHRL_FORK_SERVER of its environment names, if there is one. Any other `argv`, and a
        process with `rlimits` or `pass_fds`, is executed. `log` receives stdout and stderr (None:
        ours).
        """

    def adopt(
        self, pid: int, start_time: int, *, name: str, program: Sequence[str] = ()
    ) -> ChildProcess | None:
        """Return the running process that an earlier incarnation spawned; None if it has exited.

        Pass `program` (a module and its first arguments) if the pid comes from another process. The
        result is then also None unless the process runs that program for this process's mesh.
        """

    def run_periodically(
        self, interval_s: float, fn: Callable[[], bool | None], name: str
    ) -> Stoppable:
        """Call `fn` every `interval_s` seconds, off the event loop, until it returns False.

        An exception is printed and `fn` is called again: a lease is still renewed after one
        failure.
        """

    async def run_blocking(self, fn: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """Run `fn(*args)` off the event loop and return its result.

        DeadlineExceeded leaves the call running and discards its result.
        """

    def open_append(self, path: Path) -> AppendFile:
        """Open a file for appending records; create it if it is missing."""

    def replace_file(self, path: Path, content: bytes) -> None:
        """Replace the file at `path` atomically: after a power failure it has the old or the new
        content.
        """

    def exit(
        self, code: int, why: str, error: BaseException | None = None, job: str = ""
    ) -> NoReturn:
        """Exit at once with `code` and print the reason.

        The parent process finds the error and its job.
        """

    def find_failure(self, pid: int, log: Path | None, code: int = 1) -> Failure | None:
        """Return the error that ended a process spawned with `log`, by its exit status.

        Returns None if the process was killed or left no report.
        """

    @property
    def identity(self) -> tuple[int, int]:
        """Pid and start time of this process, unique on this machine until it reboots."""

    def measure_free_space(self, directory: Path) -> FreeSpace:
        """Return free bytes of memory, and of the disk of `directory`."""

    def measure_processors(self) -> ProcessorUsage:
        """Measure the processors that the processes of this host share, and their load."""

    def measure_usage(self) -> dict[str, float]:
        """Return this process's resource usage by name; see
        `meshrl.common.mesh.process.processor_usage.measure_process_usage`.
        """


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file at `path` atomically: after a crash it has the old or the new content."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("wb") as file:
        file.write(content)
        file.flush()
        fsync(file.fileno())
    scratch.replace(path)
    fsync_path(path.parent)


class _PeriodicThread:
    def __init__(self, interval_s: float, fn: Callable[[], bool | None], name: str) -> None:
        self._stopped = threading.Event()
        self._interval_s, self._fn = interval_s, fn
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                if self._fn() is False:
                    return
            except Exception:
                traceback.print_exc()

    def stop(self) -> None:
        self._stopped.set()


_WorkItem = tuple["Future[Any]", Callable[[], Any]]


class _DaemonThreadPool:
    """Thread pool whose stuck threads do not keep the process alive, unlike concurrent.futures.

    The thread that became idle last is taken first. Consecutive work stays in one thread, whose
    caches and memory arena are warm (7 % of a training step's CPU time).
    """

    def __init__(self, max_threads: int) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_WorkItem]] = []
        self._waiting: deque[_WorkItem] = deque()
        self._max_threads, self._threads = max_threads, 0

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._idle:
                self._idle.pop().put((future, fn))
            elif self._threads < self._max_threads:
                self._threads += 1
                inbox: queue.SimpleQueue[_WorkItem] = queue.SimpleQueue()
                inbox.put((future, fn))
                threading.Thread(
                    target=self._serve, args=(inbox,), name="blocking", daemon=True
                ).start()
            else:
                self._waiting.append((future, fn))
        return future

    def _serve(self, inbox: queue.SimpleQueue[_WorkItem]) -> None:
        while True:
            future, fn = inbox.get()
            tell: Callable[[], None] | None = None
            if future.set_running_or_notify_cancel():
                try:
                    tell = partial(future.set_result, fn())
                except BaseException as error:
                    tell = partial(future.set_exception, error)
            self._mark_idle(inbox)
            if tell is not None:
                tell()
            del future, fn, tell

    def _mark_idle(self, inbox: queue.SimpleQueue[_WorkItem]) -> None:
        """Mark this thread idle before its result is set, so that the next submission finds it."""
        with self._lock:
            if self._waiting:
                inbox.put(self._waiting.popleft())
            else:
                self._idle.append(inbox)


class SystemHost:
    """Host of the real machine."""

    def __init__(self) -> None:
        self._blocking = _DaemonThreadPool(BLOCKING_THREADS)
        self._spawner = Spawner()
        self._oom_kills = host_limits.count_oom_kills()  # kills before this host object

    def spawn(
        self,
        argv: list[str],
        *,
        name: str,
        env: Mapping[str, str] = {},
        log: Path | None = None,
        options: SpawnOptions = DEFAULT_OPTIONS,
    ) -> SystemChild:
        """Start a process; see `Host.spawn`.

        A process that dies with its parent can start from the main thread only.
        """
        environment = {**os.environ, **env}
        environment.pop(CHANNEL_FD, None)
        environment.pop(FAILURE_ENV, None)
        if log is not None:
            environment[FAILURE_ENV] = str(failure_path(log.absolute()))
        return self._spawner.spawn(SpawnRequest(name, argv, environment, log, options))

    def adopt(
        self, pid: int, start_time: int, *, name: str, program: Sequence[str] = ()
    ) -> SystemChild | None:
        """Return the running process with this pid and start time; see `Host.adopt`."""
        child = SystemChild(name, pid)
        if not child.start_time == start_time != 0 or child.poll() is not None:
            return None
        return child if not program or mesh_processes.is_mesh_program(pid, program) else None

    def run_periodically(
        self, interval_s: float, fn: Callable[[], bool | None], name: str
    ) -> Stoppable:
        """Call `fn` every `interval_s` seconds in a separate thread, until it returns False."""
        return _PeriodicThread(interval_s, fn, name)

    async def run_blocking(self, fn: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """Run `fn(*args)` in a thread; DeadlineExceeded leaves it running and discards its
        result.
        """
        future = self._blocking.submit(lambda: fn(*args))
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if not deadline.expired():
                raise
            what = getattr(fn, "__qualname__", repr(fn))
            raise DeadlineExceeded(f"{what} took longer than {deadline_s:g} s") from None

    def open_append(self, path: Path) -> AppendFile:
        """Open a file for appending records; create it if it is missing."""
        return AppendFile(path)

    def replace_file(self, path: Path, content: bytes) -> None:
        """Replace the file at `path` atomically: after a crash it has the old or the new
        content.
        """
        replace_file(path, content)

    def exit(
        self, code: int, why: str, error: BaseException | None = None, job: str = ""
    ) -> NoReturn:
        """Exit at once with `code`, without clean-up, and print the reason to stderr."""
        if error is not None:
            failure.write_failure(error, job)
        with contextlib.suppress(OSError):  # a full disk
            print(f"exit {code}: {why}", file=sys.stderr, flush=True)
        os._exit(code)

    def find_failure(self, pid: int, log: Path | None, code: int = 1) -> Failure | None:
        """Return the error that a process left beside its log, or an out-of-memory failure."""
        if code != -signal.SIGKILL:
            return failure.read_failure(log, pid) if code > 0 else None
        before, self._oom_kills = self._oom_kills, host_limits.count_oom_kills()
        text = host_limits.explain_oom_kill(before)
        return Failure("OutOfMemory", text.rstrip(".")) if text else None

    @property
    def identity(self) -> tuple[int, int]:
        """Pid and start time of this process."""
        return os.getpid(), read_own_start_time()

    def measure_free_space(self, directory: Path) -> FreeSpace:
        """Return free bytes of memory, and of the disk of `directory`."""
        return host_limits.measure_free_space(directory)

    def measure_processors(self) -> ProcessorUsage:
        """Measure the processors that the processes of this host share, and their load."""
        return measure_processors()

    def measure_usage(self) -> dict[str, float]:
        """Return memory and CPU time of this process."""
        return measure_process_usage()


def read_own_start_time() -> int:
    """Return the start time of this process; with its pid, which can be reused, it identifies the
    process.
    """
    return read_start_time(os.getpid())
