"""Handles of spawned processes, for their parent or for the next incarnation of their parent."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import NamedTuple, Protocol

from meshrl.common.base.errors import BadMessage, DeadlineExceeded, PeerLost
from meshrl.common.mesh.process.entry.child import MAX_FRAME_BYTES, take_frame
from meshrl.common.mesh.process.forking.fork_client import ForkedProcess

UNKNOWN_EXIT_STATUS = 255  # of a process that is not our child, so that its status is unknown
STATUS_TIMEOUT_S = 2.0  # wait for the exit status from the process that reaps it
POLL_S = 0.05  # seconds; on kernels without pidfd_open (before 5.3)


class ChildProcess(Protocol):
    """Spawned process.

    If it leads its own session, the rest of that session is killed with it. If it has a guard, all
    its descendants are.
    """

    name: str
    pid: int
    start_time: int  # clock ticks since boot: with pid, unique until a reboot

    def poll(self) -> int | None:
        """Return the exit status (negative: the signal), or None while it runs."""

    async def wait(self, deadline_s: float) -> int | None:
        """Return the exit status, or None if it still runs after `deadline_s` seconds."""

    def terminate(self) -> None:
        """Send SIGTERM; do nothing if the process has exited."""

    def kill(self) -> None:
        """Send SIGKILL, to its whole session if it leads one."""

    async def send(self, frame: bytes, deadline_s: float = 10.0) -> None:
        """Send one frame through the channel; raise PeerLost if the child has closed it."""

    async def recv(self, deadline_s: float) -> bytes:
        """Receive the next frame.

        Raises DeadlineExceeded, PeerLost at the end of the channel, and BadMessage for an invalid
        frame.
        """

    def close(self) -> None:
        """Close our end of the channel."""

    def read_usage(self) -> ProcessUsage | None:
        """Return the CPU time and state that the kernel reports; None after the exit."""


class ProcessUsage(NamedTuple):
    """CPU time of all threads, the main thread's wait for a core, and the process state letter."""

    cpu_s: float
    run_queue_s: float
    state: str


_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def _read_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third (the state) on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def read_start_time(pid: int) -> int:
    """Return clock ticks from boot to the start of `pid`; 0 for a missing process or a zombie."""
    fields = _read_stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def read_parent_pid(pid: int) -> int:
    """Return the pid of a process's parent; 0 if there is no such process."""
    fields = _read_stat(pid)
    return int(fields[1]) if fields else 0


def read_process_usage(pid: int) -> ProcessUsage | None:
    """Return CPU seconds, seconds of waiting for a core, and state of a process; None after its
    exit.
    """
    fields = _read_stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    queued_s = 0.0
    with contextlib.suppress(OSError):  # a kernel without scheduler statistics: report no wait
        queued_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return ProcessUsage((int(fields[11]) + int(fields[12])) * _TICK_S, queued_s, fields[0])


# ioctl of a pidfd, which keeps the exit status of a process that another process reaped (Linux
# 6.15; `struct pidfd_info` of <linux/pidfd.h>: 64 bytes from the mask to the exit code).
PIDFD_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
PIDFD_INFO_EXIT = 1 << 3


def read_exit_status(pidfd: int) -> int | None:
    """Return the exit status of an exited process that is not our child.

    Returns UNKNOWN_EXIT_STATUS on older kernels, and None until the process is reaped.
    """
    info = bytearray(struct.pack("=Q56x", PIDFD_INFO_EXIT))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:
        return UNKNOWN_EXIT_STATUS
    mask, status = struct.unpack("=Q52xi", info)
    return os.waitstatus_to_exitcode(status) if mask & PIDFD_INFO_EXIT else None


async def wait_readable(descriptor: int, deadline_s: float) -> bool:
    """Return True if a descriptor becomes readable in time; close it afterwards."""
    loop = asyncio.get_running_loop()
    readable_event = asyncio.Event()
    loop.add_reader(descriptor, readable_event.set)
    try:
        async with asyncio.timeout(deadline_s):
            await readable_event.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return True


class SystemChild:
    """Process of this machine: spawned (`popen`), forked by a fork server (`forked`), or
    adopted by its pid and start time.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        *,
        popen: subprocess.Popen[bytes] | None = None,
        forked: ForkedProcess | None = None,
        channel: socket.socket | None = None,
        leads_session: bool = False,
        guard: int = 0,
    ) -> None:
        """Create a handle. `guard` is the pid of its guard, equal to `pid` while the child's own
        pid is unknown.
        """
        self.name, self.pid = name, pid
        self._guard = guard
        self.start_time = read_start_time(pid)
        self._popen, self._forked = popen, forked
        self._exited_at = 0.0  # first poll after the exit of a process that is not our child
        self._channel = channel
        self._buffer = bytearray()
        self._has_reader = False
        self._arrived: asyncio.Future[None] | None = None
        self._leads_session = leads_session
        self._exit_status: int | None = None
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # exited, or an old kernel: poll() and wait() work without it
            self._pidfd = -1

    def poll(self) -> int | None:
        """Return the exit code (-N: a signal); None while it runs.

        Returns UNKNOWN_EXIT_STATUS on older kernels if the process was adopted, or its fork server
        exited first.
        """
        if self._exit_status is not None:
            return self._exit_status
        if self._popen is not None:
            if self._leads_session and not read_start_time(self.pid):
                self._kill_session()  # before it is reaped: until then its pid is not reused
            code = self._popen.poll()
        else:
            code = None if self._forked is None else self._forked.poll()
            if code is None and not self._is_running():
                code = self._find_unowned_status()
        if code is not None:
            self._exit_status = code
            if self._forked is not None:
                self._forked.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
        return code

    def _is_running(self) -> bool:
        return self.start_time != 0 and read_start_time(self.pid) == self.start_time

    def _find_unowned_status(self) -> int | None:
        """Return the exit status of a process that another process reaps; None while it may still
        arrive.
        """
        self._exited_at = self._exited_at or time.monotonic()
        late = time.monotonic() - self._exited_at > STATUS_TIMEOUT_S
        if self._forked is not None and not self._forked.is_status_lost and not late:
            return None
        if self._leads_session:
            self._kill_session()
        code = read_exit_status(self._pidfd)
        return UNKNOWN_EXIT_STATUS if code is None and late else code

    async def wait(self, deadline_s: float) -> int | None:
        """Return the exit code; None if the process still runs after `deadline_s` seconds."""
        code = self.poll()
        if code is not None or deadline_s <= 0:
            return code
        if self._pidfd < 0:
            return await self._wait_polling(deadline_s)
        # A loop has one reader per descriptor, so each waiter watches a duplicate.
        if not await wait_readable(os.dup(self._pidfd), deadline_s):
            return None
        code = self.poll()
        if code is None and self._forked is not None and self._forked.fileno() >= 0:
            await wait_readable(os.dup(self._forked.fileno()), STATUS_TIMEOUT_S)
            code = self.poll()
        return await self._wait_polling(STATUS_TIMEOUT_S) if code is None else code

    async def _wait_polling(self, deadline_s: float) -> int | None:
        for _ in range(math.ceil(deadline_s / POLL_S)):
            await asyncio.sleep(POLL_S)
            if self.poll() is not None:
                break
        return self._exit_status

    def terminate(self) -> None:
        """Send SIGTERM; do nothing if the process has exited."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, to its whole session if it leads one, and to all its descendants if it has
        a guard.
        """
        if self._guard:
            self._kill_guarded()
            return
        if self._leads_session and self.poll() is None:
            self._kill_session()
        self._signal(signal.SIGKILL)

    def _kill_guarded(self) -> None:
        if self.poll() is not None:
            return
        self._learn_guarded_pid()
        ends = [(self._guard, signal.SIGTERM), (self._guard, signal.SIGCONT)]
        if self.pid != self._guard and self._is_running():
            ends.insert(0, (self.pid, signal.SIGKILL))
        for pid, number in ends:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _learn_guarded_pid(self) -> None:
        """Read the pid of a guarded process: the first child of its guard."""
        if self.pid != self._guard:
            return
        with contextlib.suppress(OSError, IndexError):
            children = Path(f"/proc/{self._guard}/task/{self._guard}/children").read_text()
            pid = int(children.split()[0])
            self.start_time = read_start_time(pid)
            self.pid = pid

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def read_usage(self) -> ProcessUsage | None:
        """Return CPU seconds, seconds of waiting for a core, and state; None after its exit."""
        if self._guard:
            self._learn_guarded_pid()
        return read_process_usage(self.pid)

    async def send(self, frame: bytes, deadline_s: float = 10.0) -> None:
        """Send one frame to the process.

        Raises PeerLost if it has closed the channel or has none, and BadMessage if the frame is too
        large.
        """
        if self._channel is None:
            raise PeerLost("the process has no channel", where=self.name)
        if len(frame) > MAX_FRAME_BYTES:
            raise BadMessage(f"a frame has {len(frame)} bytes, over the limit", where=self.name)
        record = len(frame).to_bytes(4, "little") + frame
        channel, sent = self._channel, 0
        try:
            with contextlib.suppress(BlockingIOError):
                sent = channel.send(record)
            if sent < len(record):
                async with asyncio.timeout(deadline_s):
                    await asyncio.get_running_loop().sock_sendall(channel, record[sent:])
        except TimeoutError:
            raise DeadlineExceeded(f"the process accepted no frame in {deadline_s:g} s") from None
        except OSError as error:
            raise PeerLost(f"the channel is closed ({error})", where=self.name) from error

    async def recv(self, deadline_s: float) -> bytes:
        """Receive the next frame; errors as in `ChildProcess.recv`.

        A callback fills a buffer, so that a deadline loses no bytes.
        """
        if (frame := self._take_frame()) is not None:
            return frame
        loop = asyncio.get_running_loop()
        if self._channel is not None and not self._has_reader:
            loop.add_reader(self._channel, self._read)
            self._has_reader = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while frame is None:
                    if self._channel is None:
                        raise PeerLost("the process closed its channel", where=self.name)
                    self._arrived = loop.create_future()
                    await self._arrived
                    frame = self._take_frame()
        if frame is None and (frame := self._take_frame()) is None:
            raise DeadlineExceeded(
                f"the process sent no frame in {deadline_s:g} s", where=self.name
            )
        if self._guard:
            self._learn_guarded_pid()
        return frame

    def _take_frame(self) -> bytes | None:
        try:
            return take_frame(self._buffer)
        except ValueError as error:
            raise BadMessage(str(error), where=self.name) from error

    def _read(self) -> None:
        assert self._channel is not None
        try:
            more = self._channel.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        self._buffer += more
        if not more or len(self._buffer) > 2 * MAX_FRAME_BYTES:
            self.close()
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def close(self) -> None:
        """Close the channel, if there is one."""
        if self._channel is not None:
            if self._has_reader:
                asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
