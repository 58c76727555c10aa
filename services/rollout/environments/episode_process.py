"""Environment process that answers operations independently, in any order.

It serves environments with their own event loop or threads. An environment that waits for its tools
must not block the others, as it would in a batch that is answered as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from meshrl.common.base.errors import DeadlineExceeded, MeshError, PeerLost
from meshrl.common.environment.framing import build_frames, pack_message
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.rollout.environments.environment_process import (
    EnvironmentChild,
    EnvironmentHung,
    EnvironmentLost,
    Operation,
    count_deadlines,
    decode_answer,
    encode_operation,
    is_stopped,
)

START_TIMEOUT_S = 180.0  # import of `verifiers` and start of its tool servers on a busy host
POLL_S = 0.5  # interval of deadline checks
PROBE_TIMEOUT_S = 10.0  # a process without any answer for so long is blocked
PROBE_NUMBER = 0  # number of the probe operation


@dataclass(slots=True)
class OpenOperation:
    future: asyncio.Future[Any]
    timeout_s: float
    deadline_s: float  # by the mesh's clock


class EpisodeProcess(EnvironmentChild):
    """Environment process whose operations are sent at once and answered by number.

    An overdue operation fails alone while the process answers others. A process without answers is
    killed with all its environments.
    """

    def __init__(
        self, mesh: Mesh, argv: list[str], name: str, log: Path, deadline_s: float, job: str = ""
    ) -> None:
        super().__init__(mesh, argv, name, log, deadline_s, job)
        self._numbers = itertools.count(PROBE_NUMBER + 1)
        self._open_operations: dict[int, OpenOperation] = {}
        self._unsent_messages: list[bytes] = []
        self._probed_at_s: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._send_lock = asyncio.Lock()

    def submit(self, operation: Operation, *, unbatched: bool = False) -> asyncio.Future[Any]:
        """Submit an operation and return the future of its answer. `unbatched` has no effect here,
        as no operation is batched.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._child is None and operation[1] == "close":
            future.set_result(None)
            return future
        number = next(self._numbers)
        message = encode_operation([number, *operation], operation[1], self.name)
        if not isinstance(message, bytes):
            future.set_exception(message)
            return future
        patience_s = self._deadline_s * count_deadlines(operation)
        patience_s += START_TIMEOUT_S if self._child is None or self._is_starting else 0.0
        deadline = self._mesh.clock.monotonic() + patience_s
        self._open_operations[number] = OpenOperation(future, patience_s, deadline)
        self._enqueue(message)
        return future

    def _enqueue(self, message: bytes) -> None:
        if not self._unsent_messages:
            self._start_task(self._flush(), "flush")
        self._unsent_messages.append(message)

    def _start_task(self, work: Any, what: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"{what} {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _flush(self) -> None:
        child = self._child
        try:
            if child is None:
                self._probed_at_s = None
                child = self._spawn()
                self._start_task(self._read_answers(child), "follow")
            messages, self._unsent_messages = self._unsent_messages, []
            async with self._send_lock:
                for frame in build_frames(messages):
                    await child.send(frame)
        except PeerLost:
            return  # the next owner reads the last answers, and then finds the channel closed
        except Exception as error:  # half a frame may have been sent
            await self._abandon_child(child, error)

    async def _read_answers(self, child: ChildProcess) -> None:
        try:
            while True:
                with contextlib.suppress(DeadlineExceeded):
                    block = await child.recv(POLL_S)
                    self._is_starting = False
                    for number, status, value in msgpack.unpackb(block, raw=False):
                        if number == PROBE_NUMBER:
                            self._probed_at_s = None
                            for late in self._list_overdue():
                                self._resolve(late, self._make_hung_error(late))
                        else:
                            self._resolve(number, decode_answer(status, value, self.name))
                now = self._mesh.clock.monotonic()
                if self._probed_at_s is None and self._list_overdue():  # probe the process
                    self._probed_at_s = now
                    self._enqueue(pack_message([PROBE_NUMBER, 0, "text", []]))
                elif self._probed_at_s is not None and now > self._probed_at_s + PROBE_TIMEOUT_S:
                    raise EnvironmentLost(
                        f"the process did not answer a probe within {PROBE_TIMEOUT_S:g} s"
                    )
        except Exception as error:  # open operations would stay pending after any error
            await self._abandon_child(child, error)

    def _resolve(self, number: int, answer: Any) -> None:
        settled = self._open_operations.pop(number, None)
        if settled is None or settled.future.done():
            return
        if isinstance(answer, Exception):
            settled.future.set_exception(answer)
        else:
            settled.future.set_result(answer)

    def _list_overdue(self) -> list[int]:
        now = self._mesh.clock.monotonic()
        return [n for n, o in self._open_operations.items() if o.deadline_s < now]

    def _make_hung_error(self, number: int) -> EnvironmentHung:
        return EnvironmentHung(f"no answer within {self._open_operations[number].timeout_s:.0f} s")

    async def _abandon_child(self, child: ChildProcess | None, error: Exception) -> None:
        """Abandon a process (None: it did not start) with all its open operations."""
        if child is self._child:
            late = [] if is_stopped(child) else self._list_overdue()
            self._child, self._unsent_messages = None, []
            open_ids = list(self._open_operations)
            lost: MeshError = EnvironmentLost(f"environment process {self.name}: {error}")
            if child is not None:
                lost = await self._report_loss(child, error)
            for number in open_ids:
                if number in self._open_operations:  # else answered in the mean time
                    self._resolve(number, self._make_hung_error(number) if number in late else lost)
        if child is not None:
            child.kill()
            await child.wait(5.0)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for operation in self._open_operations.values():
            operation.future.cancel()
        await self._stop_child()
