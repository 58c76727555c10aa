"""The host: every use of processes, threads and files goes through `Host`, so that it can be
simulated.
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
    """Something that runs until it is stopped."""

    def stop(self) -> None:
        """Ends it; a call that is running now still finishes."""


class Host(Protocol):
    """What a process needs of its machine, as the machine or a simulation gives it."""

    def spawn(
        self,
        argv: list[str],
        *,
        name: str,
        env: Mapping[str, str] = {},
        log: Path | None = None,
        options: SpawnOptions = DEFAULT_OPTIONS,
    ) -> ChildProcess:
        """Starts a process, from the main thread.

        `argv` of `[sys.executable, "-m", module, ...]` runs the module, in a fork of the nursery
        that $MESHRL_NURSERY of its environment names, if there is one; anything else is executed,
        and so is what has `rlimits` or `pass_fds`.
        `log` takes stdout and stderr (None: ours).
        """

    def adopt(
        self, pid: int, start_time: int, *, name: str, program: Sequence[str] = ()
    ) -> ChildProcess | None:
        """The running process that an earlier incarnation spawned; None if it has ended. With a
        `program` (a module and its first arguments), where somebody else told of it: None too
        unless it runs that, for this process's mesh.
        """

    def run_periodically(
        self, interval_s: float, fn: Callable[[], bool | None], name: str
    ) -> Stoppable:
        """Calls `fn` each `interval_s`, off the event loop, until it returns False.

        What it raises is printed, and it is called again: a lease is still renewed after one
        failure.
        """

    async def run_blocking(self, fn: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """The result of `fn(*args)`, run off the event loop; DeadlineExceeded leaves it running,
        its result unused.
        """

    def open_append(self, path: Path) -> AppendFile:
        """A file to append records to; it is created if it is missing."""

    def replace_file(self, path: Path, content: bytes) -> None:
        """Puts `content` at `path`, which holds the old content or all of the new, whenever the
        power goes.
        """

    def exit(
        self, code: int, why: str, error: BaseException | None = None, job: str = ""
    ) -> NoReturn:
        """Ends this process at once with `code`, and prints why. Who started it finds the error,
        and the job that it is of.
        """

    def find_failure(self, pid: int, log: Path | None, code: int = 1) -> Failure | None:
        """The error that ended a process which was spawned with `log`, by its exit status; None for
        one that somebody killed, or that has left no word.
        """

    @property
    def identity(self) -> tuple[int, int]:
        """The pid and the start time of this process, which name it for ever."""

    def measure_free_space(self, directory: Path) -> FreeSpace:
        """Bytes that are left of memory, and of the disk that `directory` is on."""

    def measure_processors(self) -> ProcessorUsage:
        """Processors that the processes of this host share, and how busy they have been."""

    def measure_usage(self) -> dict[str, float]:
        """What this process uses, by name; see
        `meshrl.common.mesh.process.processor_usage.measure_process_usage`.
        """


def replace_file(path: Path, content: bytes) -> None:
    """Puts `content` at `path`: after a crash it holds the old content or all of the new."""
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
    """A pool whose stuck threads do not keep the process alive, as concurrent.futures' do.

    The thread that was idle last is taken first: work that comes one piece after another stays in
    one thread, whose caches and memory arena are warm (7 % of a training step's CPU time).
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
        """Before the result is told: who asks for the next piece then finds this thread idle."""
        with self._lock:
            if self._waiting:
                inbox.put(self._waiting.popleft())
            else:
                self._idle.append(inbox)


class SystemHost:
    """The machine itself."""

    def __init__(self) -> None:
        self._blocking = _DaemonThreadPool(BLOCKING_THREADS)
        self._spawner = Spawner()
        self._oom_kills = host_limits.count_oom_kills()  # before ours

    def spawn(
        self,
        argv: list[str],
        *,
        name: str,
        env: Mapping[str, str] = {},
        log: Path | None = None,
        options: SpawnOptions = DEFAULT_OPTIONS,
    ) -> SystemChild:
        """Starts a process; see `Host.spawn`. Refused from any thread but the main one where it
        dies with its parent.
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
        """The running process of this number and start time; see `Host.adopt`."""
        child = SystemChild(name, pid)
        if not child.start_time == start_time != 0 or child.poll() is not None:
            return None
        return child if not program or mesh_processes.is_mesh_program(pid, program) else None

    def run_periodically(
        self, interval_s: float, fn: Callable[[], bool | None], name: str
    ) -> Stoppable:
        """Calls `fn` each `interval_s` seconds in a thread of its own, until it returns False."""
        return _PeriodicThread(interval_s, fn, name)

    async def run_blocking(self, fn: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """`fn(*args)` in a thread; DeadlineExceeded leaves it running, its result unused."""
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
        """A file to append records to; it is created if it is missing."""
        return AppendFile(path)

    def replace_file(self, path: Path, content: bytes) -> None:
        """Puts `content` at `path`: after a crash it holds the old content or all of the new."""
        replace_file(path, content)

    def exit(
        self, code: int, why: str, error: BaseException | None = None, job: str = ""
    ) -> NoReturn:
        """Ends this process at once with `code`, without clean-up, and prints why to stderr."""
        if error is not None:
            failure.write_failure(error, job)
        with contextlib.suppress(OSError):  # a full disk
            print(f"exit {code}: {why}", file=sys.stderr, flush=True)
        os._exit(code)

    def find_failure(self, pid: int, log: Path | None, code: int = 1) -> Failure | None:
        """The error that a process has left beside its log, or that memory was wanting."""
        if code != -signal.SIGKILL:
            return failure.read_failure(log, pid) if code > 0 else None
        before, self._oom_kills = self._oom_kills, host_limits.count_oom_kills()
        text = host_limits.explain_oom_kill(before)
        return Failure("OutOfMemory", text.rstrip(".")) if text else None

    @property
    def identity(self) -> tuple[int, int]:
        """The pid and the start time of this process."""
        return os.getpid(), read_own_start_time()

    def measure_free_space(self, directory: Path) -> FreeSpace:
        """Bytes that are left of memory, and of the disk that `directory` is on."""
        return host_limits.measure_free_space(directory)

    def measure_processors(self) -> ProcessorUsage:
        """Processors that the processes of this host share, and how busy they have been."""
        return measure_processors()

    def measure_usage(self) -> dict[str, float]:
        """Memory and CPU time of this process."""
        return measure_process_usage()


def read_own_start_time() -> int:
    """The start time of this process, which names it together with its pid: pids are used again."""
    return read_start_time(os.getpid())
