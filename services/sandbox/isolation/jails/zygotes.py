"""A running zygote: it is asked for jails, says when it has begun each, and is noticed when it does
not.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.mesh.process.handle import Child, Usage, start_time
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.services.sandbox.workers.slicing import charged_s

LOOK_S = 0.5  # between two looks at a zygote that has not answered
SILENT_S = 10.0  # CPU time, or time with a core to be had: a fork takes milliseconds
STOPPED = "Tt"  # states of a process that was stopped, in /proc
CREDENTIALS = struct.Struct("3i")  # pid (in our namespace), uid, gid of who has sent


class ZygoteSilent(MeshError):
    """It runs and forks nothing: another must take its place."""

    code = "zygote_silent"
    retryable = True


class Zygote:
    """`child` is the outer jail, or the zygote itself; `control` our end of its socket."""

    def __init__(
        self, host: Host, clock: Clock, child: Child, control: socket.socket, waits: WaitTable
    ) -> None:
        self._host, self._clock, self._waits = host, clock, waits
        self.child, self._control = child, control
        self._own: Child = child
        self._unanswered: deque[tuple[asyncio.Future[None], Callable[[], None]]] = deque()
        self._jails = 0  # that run
        self._retired = False
        self.ended = False  # it has closed its end of the socket

    @property
    def pid(self) -> int:
        """The process that forks, as `kill` has to name it."""
        return self._own.pid

    async def warmed(self, deadline_s: float) -> bool:
        """Whether it is ready to fork; False when it has ended."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        loop.add_reader(self._control, arrived.set)
        try:
            async with self._clock.timeout(deadline_s, "the start of a zygote"):
                await arrived.wait()
        finally:
            loop.remove_reader(self._control)
        word, told, _, _ = self._control.recvmsg(16, socket.CMSG_SPACE(CREDENTIALS.size))
        if word != b"warm":
            return False
        for level, kind, content in told:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid, _, _ = CREDENTIALS.unpack(content[: CREDENTIALS.size])
                self._own = self._host.adopt(pid, start_time(pid), name="zygote") or self.child
        loop.add_reader(self._control, self._answered)
        return True

    def send(
        self, packet: bytes, fds: Sequence[int], settled: Callable[[], None]
    ) -> asyncio.Future[None]:
        """Asks for a jail; resolves when it has been forked. BlockingIOError: it takes no more now;
        other OSErrors: it has ended.

        `settled` is called once the jail has been forked or cannot be any more. That may be long
        after whoever asked has gone: what the jail would take is not another's until then.
        """
        socket.send_fds(self._control, [packet], list(fds))
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unanswered.append((begun, settled))
        self._jails += 1
        return begun

    async def begun(self, answer: asyncio.Future[None]) -> None:
        """Waits for its answer. ZygoteSilent when it does nothing, ConnectionResetError when it has
        ended. Meanwhile this process says that it waits for the zygote, by its number.
        """
        asked = self._clock.monotonic()
        before: Usage | None = None  # read only for one that is late: it costs a tenth of a fork
        looks = 0
        with self._waits.wait("a jail", on=f"the zygote (pid {self.pid})"):
            while True:
                try:
                    async with self._clock.timeout(LOOK_S, "a jail's beginning"):
                        return await asyncio.shield(answer)
                except DeadlineExceeded:
                    pass
                usage = self._own.usage()
                if usage is None:
                    raise ConnectionResetError("the zygote has ended")
                before = before or usage
                looks = looks + 1 if usage.state in STOPPED else 0
                if looks > 1:
                    raise ZygoteSilent(f"somebody has stopped it (pid {self.pid})")
                silent_s = charged_s(self._clock.monotonic() - asked, usage, before)
                if silent_s > SILENT_S:
                    raise ZygoteSilent(f"it has not answered for {silent_s:.0f} s")

    def _answered(self) -> None:
        try:
            while self._control.recv(16):
                answer, settled = self._unanswered.popleft()
                if not answer.done():  # else whoever asked has gone
                    answer.set_result(None)
                settled()
            ended = ConnectionResetError("the zygote has ended")
        except BlockingIOError:
            return
        except OSError as error:
            ended = ConnectionResetError(str(error))
        asyncio.get_running_loop().remove_reader(self._control)
        self.ended = True
        self._fail(ended)

    def _fail(self, error: Exception) -> None:
        while self._unanswered:
            answer, settled = self._unanswered.popleft()
            _refuse(answer, error)
            settled()

    def left(self) -> None:
        """One of its jails has ended."""
        self._jails -= 1
        if self._retired and not self._jails:
            self.kill()

    def retire(self) -> None:
        """It is asked for nothing more, and is killed when the last of its jails has ended."""
        self._retired = True
        for answer, _ in self._unanswered:  # which it may still begin: it has not ended
            _refuse(answer, ConnectionResetError("another zygote takes its place"))
        if not self._jails:
            self.kill()

    def kill(self) -> None:
        """Ends it and its jails."""
        self.child.kill()
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
        self._fail(ConnectionResetError("the zygote was killed"))


def _refuse(answer: asyncio.Future[None], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # it may be that nobody waits for it yet
