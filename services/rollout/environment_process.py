"""One environment process of a rollout shard: operations in batches, and what ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgpack

from common.errors import DeadlineExceeded, MeshError, ToolFailed
from common.mesh import Mesh
from common.process import Child
from services.rollout.batching import Batcher

Operation = tuple[int, str, Any]  # trajectory, operation, argument
START_S = 60.0  # importing the author's modules may take its time
LOOK_AGAIN_S = 0.2  # past a deadline: this process itself may have been stopped until then
STOPPED = "Tt"  # states of a process that was stopped, in /proc


class EnvironmentLost(MeshError):
    """The process that held the environment has died; it can be rebuilt from the log."""

    code = "environment_lost"
    retryable = True


class EnvironmentHung(EnvironmentLost):
    """A running process did not answer one operation, which was alone in its batch."""

    code = "environment_hung"


class EnvironmentProcess:
    """One process; operations queue into batches, a hang past the deadline kills it."""

    def __init__(
        self, mesh: Mesh, argv: list[str], name: str, log: Path, deadline_s: float
    ) -> None:
        self._mesh, self._argv, self._log = mesh, argv, log
        self.name = name
        self._deadline_s = deadline_s
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._batcher: Batcher[Operation, Any] = Batcher(self._exchange)
        self._fresh = True

    @property
    def pid(self) -> int:
        return self._child.pid if self._child else 0

    def put(self, operation: Operation, *, alone: bool = False) -> asyncio.Future[Any]:
        return self._batcher.put(operation, alone=alone)

    async def _ready(self) -> Child:
        async with self._starting:
            if self._child is None:
                self._fresh = True
                self._child = self._mesh.host.spawn(
                    self._argv, name=self.name, log=self._log, pipe=True
                )
            return self._child

    async def _exchange(self, batch: list[Operation]) -> list[Any]:
        child = await self._ready()
        deadline_s = self._deadline_s + (START_S if self._fresh else 0.0)
        try:
            with self._mesh.wait(batch[0][1], on=self.name):
                await child.send(msgpack.packb(batch, use_bin_type=True))
                block = await self._received(child, deadline_s)
        except (OSError, EOFError, MeshError) as error:
            usage = child.usage()
            stopped = usage is not None and usage.state in STOPPED
            await self._bury(child)
            if isinstance(error, DeadlineExceeded) and len(batch) == 1 and not stopped:
                return [EnvironmentHung(f"{batch[0][1]}() took over {deadline_s:.0f} s")]
            lost = EnvironmentLost(f"environment process {self.name}: {error}")
            return [lost] * len(batch)
        self._fresh = False
        return [
            answer_of(status, value, self.name)
            for _, status, value in msgpack.unpackb(block, raw=False)
        ]

    async def _received(self, child: Child, deadline_s: float) -> bytes:
        try:
            return await child.recv(deadline_s)
        except DeadlineExceeded:
            return await child.recv(LOOK_AGAIN_S)

    async def _bury(self, child: Child) -> None:
        self._child = None
        child.kill()
        await child.wait(5.0)

    async def close(self) -> None:
        await self._batcher.close()
        if self._child is not None:
            await self._bury(self._child)


def answer_of(status: str, value: Any, name: str) -> Any:
    """What an answer of a process means: its value, or the error that it stands for."""
    if status == "ok":
        return value
    if status == "unknown":
        return EnvironmentLost(str(value))
    return ToolFailed(f"the environment raised {value}", where=name, fix="see the job's module")
