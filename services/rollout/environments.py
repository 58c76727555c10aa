"""The pool of environment processes of a rollout shard, and what becomes of trajectories when one
dies.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from common.errors import DeadlineExceeded, MeshError, ToolFailed
from common.jobdata import JobData
from common.mesh import Mesh
from common.process import Child
from services.rollout.batching import Batcher

Operation = tuple[int, str, Any]  # trajectory, operation, argument
START_S = 60.0  # importing the author's modules may take its time
LOOK_AGAIN_S = 0.2  # past a deadline: this process itself may have been stopped until then
HANGS = 2  # times that an operation must hang alone, in a process that nobody stopped
LOSSES = 5  # processes in a row that an operation may end: somebody else may have killed a few
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
            _answer(status, value, self.name)
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


def command(job: JobData) -> list[str]:
    """What runs an environment process of a job."""
    config = job.config.environment
    argv = [sys.executable, "-m", "services.rollout.environment_main", "--use", config.use]
    argv += ["--modules", str(job.modules), "--tokenizer", str(job.tokenizer)]
    argv += ["--prompt", job.config.dataset.prompt]
    if config.chat:
        argv += ["--chat", config.chat, "--chat-options", json.dumps(config.chat_options)]
        argv += ["--tools", json.dumps(config.tools)]
    return argv


def _answer(status: str, value: Any, name: str) -> Any:
    if status == "ok":
        return value
    if status == "unknown":
        return EnvironmentLost(str(value))
    return ToolFailed(f"the environment raised {value}", where=name, fix="see the job's module")


class EnvironmentPool:
    """Environments by trajectory, each in the process that its id maps to.

    A lost process is started again at its next operation; every trajectory it held is rebuilt there
    from `replay` before its operation is repeated. An operation that was out when a process hung is
    repeated alone, so that only the one that hangs by itself, more than once, fails.
    """

    def __init__(self, mesh: Mesh, job: JobData, logs: Path) -> None:
        config = job.config.environment
        name = "environment-" + mesh.name.replace("/", "-")
        self._processes = [
            EnvironmentProcess(
                mesh,
                command(job),
                f"{name}-{i}",
                logs / f"{name}-{i}.log",
                config.step_deadline_s,
            )
            for i in range(config.processes)
        ]

    @property
    def pids(self) -> dict[str, int]:
        return {p.name: p.pid for p in self._processes}

    async def begin(self, key: int, row: dict[str, Any]) -> list[int]:
        """Opens an environment; returns the prompt's ids."""
        ids: list[int] = await self._perform(key, "begin", row, None)
        return ids

    async def step(
        self, key: int, ids: list[int], replay: Callable[[], Any]
    ) -> tuple[str, str, Any]:
        """(the turn's text, tool | append | done, what comes with it).

        With a tool its name and input, with what is appended its ids, with the end a score or None.
        """
        text, action, value = await self._perform(key, "step", ids, replay)
        return text, action, value

    async def result(self, key: int, value: Any, replay: Callable[[], Any]) -> tuple[str, Any]:
        action, argument = await self._perform(key, "result", value, replay)
        return action, argument

    async def cut(
        self, key: int, ids: list[int], replay: Callable[[], Any]
    ) -> tuple[str, float | None]:
        """The trajectory ends here, in mid-turn or before one.

        Returns what `ids`, its unfinished turn, say, and the score of an environment that has one.
        """
        text, score = await self._perform(key, "cut", ids, replay)
        return text, score

    async def text(self, key: int, ids: list[int]) -> str:
        """What ids say; the environment is not told."""
        said: str = await self._perform(key, "text", ids, None)
        return said

    def close_one(self, key: int) -> None:
        self._process(key).put((key, "close", None)).add_done_callback(_observe)

    def _process(self, key: int) -> EnvironmentProcess:
        return self._processes[(key ^ key >> 12) % len(self._processes)]

    async def _perform(
        self, key: int, operation: str, argument: Any, replay: Callable[[], Any] | None
    ) -> Any:
        process = self._process(key)
        hangs = losses = 0
        while True:
            try:
                if not losses:
                    return await process.put((key, operation, argument))
                if replay is not None:
                    await process.put((key, "restore", replay()))
                # It may have been the one that hung: the second time nobody rides along.
                return await process.put((key, operation, argument), alone=losses > 1)
            except EnvironmentLost as error:
                losses += 1
                hangs += isinstance(error, EnvironmentHung)
                if hangs == HANGS:
                    raise ToolFailed(
                        f"the environment hung: {error}",
                        where=process.name,
                        fix="make it finish, or raise environment.step_deadline_s",
                    ) from error
                if losses > LOSSES:
                    raise ToolFailed(
                        f"{operation}() lost its environment process {losses} times: {error}",
                        where=process.name,
                    ) from error

    async def close(self) -> None:
        for process in self._processes:
            await process.close()


def _observe(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
