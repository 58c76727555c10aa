"""Client of a running zygote: requests jails, receives confirmations, detects a hung zygote."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.mesh.process.child_handle import ChildProcess, ProcessUsage, read_start_time
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.services.sandbox.workers.slice_policy import compute_charged_s

POLL_S = 0.5  # between two checks of a zygote that has not answered
SILENT_S = 10.0  # CPU time, or time with a free core: a fork takes milliseconds
STOPPED = "Tt"  # states of a process that was stopped, in /proc
CREDENTIALS = struct.Struct("3i")  # pid (in our namespace), uid, gid of the sender


class ZygoteUnresponsive(MeshError):
    """Error raised when a zygote runs but forks nothing; another must replace it."""

    code = "zygote_silent"
    retryable = True


class ZygoteClient:
    """Client of one zygote.

    `child` is the outer jail, or the zygote itself; `control` our end of its socket.
    """

    def __init__(
        self,
        host: Host,
        clock: Clock,
        child: ChildProcess,
        control: socket.socket,
        waits: WaitTable,
    ) -> None:
        self._host, self._clock, self._waits = host, clock, waits
        self.child, self._control = child, control
        self._zygote_process: ChildProcess = child
        self._pending_requests: deque[tuple[asyncio.Future[None], Callable[[], None]]] = deque()
        self._running_jails = 0  # running jails
        self._retired = False
        self.has_exited = False  # it has closed its end of the socket

    @property
    def pid(self) -> int:
        """Process that forks, by its pid in our namespace."""
        return self._zygote_process.pid

    async def wait_ready(self, deadline_s: float) -> bool:
        """Return whether the zygote is ready to fork; False when it has ended."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        loop.add_reader(self._control, arrived.set)
        try:
            async with self._clock.timeout(deadline_s, "the start of a zygote"):
                await arrived.wait()
        finally:
            loop.remove_reader(self._control)
        word, ancillary, _, _ = self._control.recvmsg(16, socket.CMSG_SPACE(CREDENTIALS.size))
        if word != b"warm":
            return False
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid, _, _ = CREDENTIALS.unpack(content[: CREDENTIALS.size])
                self._zygote_process = (
                    self._host.adopt(pid, read_start_time(pid), name="zygote") or self.child
                )
        loop.add_reader(self._control, self._read_answers)
        return True

    def request_jail(
        self, packet: bytes, fds: Sequence[int], on_done: Callable[[], None]
    ) -> asyncio.Future[None]:
        """Request a jail; the future resolves when it has been forked.

        `on_done` is called once the jail has been forked, or never will be. That may be long after
        the caller has gone; until then no other jail may use its resources.

        Raises:
            BlockingIOError: The zygote takes no more requests now.
            OSError: It has ended.
        """
        socket.send_fds(self._control, [packet], list(fds))
        forked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending_requests.append((forked, on_done))
        self._running_jails += 1
        return forked

    async def wait_forked(self, answer: asyncio.Future[None]) -> None:
        """Wait for a zygote's answer, and publish this wait with the zygote's pid.

        ZygoteUnresponsive when the zygote does nothing, ConnectionResetError when it has ended.
        """
        started_at = self._clock.monotonic()
        before: ProcessUsage | None = None  # read only for a late one: it costs a tenth of a fork
        looks = 0
        with self._waits.wait("a jail", on=f"the zygote (pid {self.pid})"):
            while True:
                try:
                    async with self._clock.timeout(POLL_S, "waiting for the start of a jail"):
                        return await asyncio.shield(answer)
                except DeadlineExceeded:
                    pass
                usage = self._zygote_process.read_usage()
                if usage is None:
                    raise ConnectionResetError("the zygote has exited")
                before = before or usage
                looks = looks + 1 if usage.state in STOPPED else 0
                if looks > 1:
                    raise ZygoteUnresponsive(f"it has been stopped by a signal (pid {self.pid})")
                silent_s = compute_charged_s(self._clock.monotonic() - started_at, usage, before)
                if silent_s > SILENT_S:
                    raise ZygoteUnresponsive(f"it has not answered for {silent_s:.0f} s")

    def _read_answers(self) -> None:
        try:
            while self._control.recv(16):
                answer, settled = self._pending_requests.popleft()
                if not answer.done():  # otherwise the caller has gone
                    answer.set_result(None)
                settled()
            exit_error = ConnectionResetError("the zygote has exited")
        except BlockingIOError:
            return
        except OSError as error:
            exit_error = ConnectionResetError(str(error))
        asyncio.get_running_loop().remove_reader(self._control)
        self.has_exited = True
        self._fail_pending(exit_error)

    def _fail_pending(self, error: Exception) -> None:
        while self._pending_requests:
            answer, settled = self._pending_requests.popleft()
            _fail_request(answer, error)
            settled()

    def jail_ended(self) -> None:
        """Record that one of its jails has ended."""
        self._running_jails -= 1
        if self._retired and not self._running_jails:
            self.kill()

    def retire(self) -> None:
        """Stop requests to the zygote, and kill it when the last of its jails has ended."""
        self._retired = True
        for answer, _ in self._pending_requests:  # which it may still fork: it has not ended
            _fail_request(answer, ConnectionResetError("another zygote replaces this one"))
        if not self._running_jails:
            self.kill()

    def kill(self) -> None:
        """Kill the zygote and its jails."""
        self.child.kill()
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
        self._fail_pending(ConnectionResetError("the zygote was killed"))


def _fail_request(answer: asyncio.Future[None], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # perhaps no caller waits for it yet
