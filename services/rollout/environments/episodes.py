"""The kind of environment process that answers each operation when it can, however many are open.

For environments that own their loop, and those with threads: one that waits for its tools must not
hold up the others, as it would in a batch that is answered as a whole.
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
from meshrl.common.environment.framing import frames, packed
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.rollout.environments.process import (
    EnvironmentChild,
    EnvironmentHung,
    EnvironmentLost,
    Operation,
    answer_of,
    is_stopped,
    message_of,
    steps_of,
)

START_S = 180.0  # importing `verifiers`, and starting its tool servers, on a busy host
LOOK_S = 0.5  # how often deadlines are looked at
PROBE_S = 10.0  # a process that answers nothing in this long is blocked
PROBE = 0  # number of the operation that asks whether it is


@dataclass(slots=True)
class Open:
    future: asyncio.Future[Any]
    patience_s: float
    deadline: float  # by the mesh's clock


class EpisodeProcess(EnvironmentChild):
    """Operations go out as they come and are answered by number.

    An operation past its deadline fails alone while the process answers others; a process that
    answers nothing is killed, with all that it held.
    """

    def __init__(
        self, mesh: Mesh, argv: list[str], name: str, log: Path, deadline_s: float, job: str = ""
    ) -> None:
        super().__init__(mesh, argv, name, log, deadline_s, job)
        self._numbers = itertools.count(PROBE + 1)
        self._open: dict[int, Open] = {}
        self._unsent: list[bytes] = []
        self._probed: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()

    def put(self, operation: Operation, *, alone: bool = False) -> asyncio.Future[Any]:
        """The future of an operation's answer; `alone` says nothing here: all are."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._child is None and operation[1] == "close":
            future.set_result(None)
            return future
        number = next(self._numbers)
        message = message_of([number, *operation], operation[1], self.name)
        if not isinstance(message, bytes):
            future.set_exception(message)
            return future
        patience_s = self._deadline_s * steps_of(operation)
        patience_s += START_S if self._child is None or self._fresh else 0.0
        deadline = self._mesh.clock.monotonic() + patience_s
        self._open[number] = Open(future, patience_s, deadline)
        self._send(message)
        return future

    def _send(self, message: bytes) -> None:
        if not self._unsent:
            self._start(self._flush(), "flush")
        self._unsent.append(message)

    def _start(self, work: Any, what: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"{what} {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _flush(self) -> None:
        child = self._child
        try:
            if child is None:
                self._probed = None
                child = self._spawn()
                self._start(self._follow(child), "follow")
            messages, self._unsent = self._unsent, []
            async with self._sending:
                for frame in frames(messages):
                    await child.send(frame)
        except PeerLost:
            return  # who follows it reads its last answers, and then finds the channel closed too
        except Exception as error:  # half a frame may be out
            await self._lose(child, error)

    async def _follow(self, child: Child) -> None:
        try:
            while True:
                with contextlib.suppress(DeadlineExceeded):
                    block = await child.recv(LOOK_S)
                    self._fresh = False
                    for number, status, value in msgpack.unpackb(block, raw=False):
                        if number == PROBE:
                            self._probed = None
                            for late in self._late():
                                self._settle(late, self._hung(late))
                        else:
                            self._settle(number, answer_of(status, value, self.name))
                now = self._mesh.clock.monotonic()
                if self._probed is None and self._late():  # asks for a sign of life
                    self._probed = now
                    self._send(packed([PROBE, 0, "text", []]))
                elif self._probed is not None and now > self._probed + PROBE_S:
                    raise EnvironmentLost(f"nothing was answered in {PROBE_S:g} s")
        except Exception as error:  # whatever it was: nobody else would settle what is open
            await self._lose(child, error)

    def _settle(self, number: int, answer: Any) -> None:
        settled = self._open.pop(number, None)
        if settled is None or settled.future.done():
            return
        if isinstance(answer, Exception):
            settled.future.set_exception(answer)
        else:
            settled.future.set_result(answer)

    def _late(self) -> list[int]:
        now = self._mesh.clock.monotonic()
        return [n for n, o in self._open.items() if o.deadline < now]

    def _hung(self, number: int) -> EnvironmentHung:
        return EnvironmentHung(f"no answer in {self._open[number].patience_s:.0f} s")

    async def _lose(self, child: Child | None, error: Exception) -> None:
        """Gives up a process (None: one that did not start) with all that is open in it."""
        if child is self._child:
            late = [] if is_stopped(child) else self._late()
            self._child, self._unsent = None, []
            held = list(self._open)
            lost: MeshError = EnvironmentLost(f"environment process {self.name}: {error}")
            if child is not None:
                lost = await self._lost(child, error)
            for number in held:
                if number in self._open:  # else answered meanwhile
                    self._settle(number, self._hung(number) if number in late else lost)
        if child is not None:
            child.kill()
            await child.wait(5.0)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for left in self._open.values():
            left.future.cancel()
        await self._dismiss()
