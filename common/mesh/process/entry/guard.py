"""Parent of a process that runs a job's own code: it ends all descendants and bounds their output.

The guard runs between the owner and that process, like an init process in a container. As a
subreaper it becomes the parent of every descendant whose own parent exits. So no descendant
escapes: neither by a session of its own, nor a double fork, nor a cleared environment. When the
process or the owner exits, the guard kills the remaining descendants, and exits in the same way as
the process.

The output of descendants comes through a pipe, and reaches the log as far as `log_bounds` allows.
The module uses only the standard library: a guard is forked for each process, or executed with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from meshrl.common.mesh.process.entry.child import tie_to_parent
from meshrl.common.mesh.process.output.log_bounds import LogBudget, rotate_if_long

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
GUARD_PROCESS_NAME = b"meshrl-guard"
PIPE_BYTES = 1 << 20  # output between two reads on a busy host, and the unit of drops
READ_BYTES = 1 << 16
TAIL_BYTES = 1 << 13  # kept from the end of dropped output
READ_DELAY_S = (
    0.001  # before a read: many lines of a program that prints line by line are read at once
)
DROP_S = 0.005  # seconds between two drops: the pipe fills, and an endless writer blocks
NOTICE_S = 1.0  # seconds without output until a drop is logged
LENGTH_CHECK_BYTES = 1 << 20  # written between two checks of the log's length
GUARD_FAILED_EXIT_STATUS = 74  # exit status of a guard with an internal error


def fork_guarded(owner: int, output: int, set_title: Callable[[], None] = lambda: None) -> int:
    """Fork. Return, in the child, the descriptor for its output.

    The parent becomes the guard and never returns.

    Args:
        owner: reading end of a pipe that closes when the owner exits.
        output: descriptor to which the guard writes the child's output.
        set_title: sets the title of the guard's process.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # the user's limit of pipe memory is reached
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()
        tie_to_parent(guard)
        return writing
    try:
        libc.prctl(PR_SET_NAME, GUARD_PROCESS_NAME, 0, 0, 0)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in (owner, output, reading):
                with contextlib.suppress(OSError):  # the descriptor of the listing
                    os.close(int(name))
        set_title()
        ProcessGuard(child, owner, _OutputPipe(reading, output)).run()
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(output, traceback.format_exc().encode())
    os._exit(GUARD_FAILED_EXIT_STATUS)


class _OutputPipe:
    """Pipe from the output of descendants to the log."""

    def __init__(self, reading: int, log: int) -> None:
        self.reading, self._log = reading, log
        self._budget, self._since_length_check = LogBudget(), 0
        self._tail = b""  # end of the dropped output

    @property
    def has_pending_notice(self) -> bool:
        return self._budget.dropped_bytes > 0

    def transfer(self) -> bool:
        """Transfer a part of the pipe's content, or drop it; return False at its end."""
        allowed = self._budget.allow(READ_BYTES)
        if not allowed:
            time.sleep(DROP_S)
            return self._drop()
        time.sleep(READ_DELAY_S)
        part = os.read(self.reading, allowed)
        self._budget.spend(len(part))
        self.write_notice()
        self._write(part)
        return bool(part)

    def write_notice(self) -> None:
        """Write how much was dropped, and its last bytes, which may be a program's last message."""
        self._budget.dropped_bytes -= len(self._tail)
        self._write(self._budget.take_notice())
        self._write(self._tail)
        self._tail = b""

    def _drop(self) -> bool:
        part = os.read(self.reading, PIPE_BYTES)
        self._budget.dropped_bytes += len(part)
        self._tail = (self._tail + part[-TAIL_BYTES:])[-TAIL_BYTES:]
        return bool(part)

    def _write(self, part: bytes) -> None:
        if not part:
            return
        with contextlib.suppress(OSError):  # a full disk: the output is lost
            os.write(self._log, part)
            self._since_length_check += len(part)
            if self._since_length_check >= LENGTH_CHECK_BYTES:
                self._since_length_check = 0
                rotate_if_long(self._log)

    def drain(self) -> None:
        """Transfer the remaining output after the last writer has exited."""
        os.set_blocking(self.reading, False)
        with contextlib.suppress(BlockingIOError):
            while self.transfer():
                pass
        self.write_notice()


class ProcessGuard:
    """Event loop of a guard's process."""

    def __init__(self, child: int, owner: int, output: _OutputPipe) -> None:
        self._child, self._owner, self._output = child, owner, output
        self._status: int | None = None  # of the child, from waitpid
        self._is_stop_requested = False  # the owner has requested the end
        self._wakeup_fd, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(wake, False)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: self._request_stop())
        signal.signal(signal.SIGUSR1, lambda number, frame: self._forward_signal(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> NoReturn:
        """Watch the child, its output and the owner, until the child or the owner has exited."""
        poller = select.poll()
        poller.register(self._wakeup_fd, select.POLLIN)
        poller.register(self._owner, 0)  # only its end
        poller.register(self._output.reading, select.POLLIN)
        self._reap()
        while self._status is None and not self._is_stop_requested:
            waits = 1000 * NOTICE_S if self._output.has_pending_notice else None
            ready = poller.poll(waits)
            if not ready:
                self._output.write_notice()
            for fd, _ in ready:
                if fd == self._wakeup_fd:
                    os.read(self._wakeup_fd, 4096)
                elif fd == self._owner:
                    self._is_stop_requested = True
                elif not self._output.transfer():
                    poller.unregister(fd)
            self._reap()
        self._kill_all()
        self._output.drain()
        _exit_like(self._status)

    def _request_stop(self) -> None:
        self._is_stop_requested = True

    def _forward_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self._child, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (exited := os.waitpid(-1, os.WNOHANG))[0]:
                self._record_exit(*exited)

    def _record_exit(self, pid: int, status: int) -> None:
        if pid == self._child:
            self._status = status

    def _kill_all(self) -> None:
        """Kill descendants until only those of other users remain."""
        with contextlib.suppress(ChildProcessError):
            while True:
                killed = False
                for below in _list_children():
                    with contextlib.suppress(OSError):  # another user's
                        os.kill(below, signal.SIGKILL)
                        killed = True
                pid, status = os.waitpid(-1, 0 if killed else os.WNOHANG)
                if pid == 0:
                    return
                self._record_exit(pid, status)


def _list_children() -> Iterator[int]:
    """Yield the pids of this process's children."""
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children", "rb") as file:
            yield from map(int, file.read().split())
    except OSError:  # a kernel without this file
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == own:
                    yield int(name)


def _exit_like(status: int | None) -> NoReturn:
    """Exit with the status of the child, or by the signal that ended it."""
    if status is None:
        os._exit(GUARD_FAILED_EXIT_STATUS)
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
