"""Simulated host whose processes are tasks and whose periodic threads are ticks of the virtual
clock.

Files are real, in a directory of the run, with a bound on their length, so that a disk can be full.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, NotFound, PeerLost
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.child_handle import ChildProcess, ProcessUsage
from meshrl.common.mesh.process.diagnosis.failure import Failure
from meshrl.common.mesh.process.diagnosis.host_limits import FreeSpace
from meshrl.common.mesh.process.host import read_own_start_time, replace_file
from meshrl.common.mesh.process.processor_usage import ProcessorUsage
from meshrl.common.mesh.process.spawning import DEFAULT_OPTIONS, SpawnOptions
from meshrl.sim.virtual_loop import run_virtual
from meshrl.sim.virtual_machine import AMPLE_SPACE

T = TypeVar("T")


class SimulatedExit(BaseException):
    """Exit raised by `Host.exit`, which ends the process's task past every `except Exception`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class SimulatedChannel:
    """The child's end of a simulated process's channel."""

    def __init__(self) -> None:
        self.to_child: asyncio.Queue[bytes] = asyncio.Queue()
        self.to_parent: asyncio.Queue[bytes] = asyncio.Queue()

    async def recv(self) -> bytes:
        return await self.to_child.get()

    def send(self, frame: bytes) -> None:
        self.to_parent.put_nowait(frame)


Program = Callable[[list[str], SimulatedChannel], Awaitable[None]]


class SimulatedChild:
    def __init__(self, name: str, pid: int, clock: Clock, run: Callable[..., Any]) -> None:
        self.name, self.pid, self.start_time = name, pid, pid
        self.channel = SimulatedChannel()
        self._clock = clock
        self._code: int | None = None
        self.failure: Failure | None = None
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(run(self.channel), name=name)
        self._task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if self._code is None:
            if task.cancelled():
                self._code = -signal.SIGTERM
            else:
                error = task.exception()
                if error is not None and not isinstance(error, SimulatedExit):
                    self.failure = Failure.from_error(error)
                self._code = error.code if isinstance(error, SimulatedExit) else int(bool(error))
        self._ended.set()

    def poll(self) -> int | None:
        return self._code if self._ended.is_set() else None

    async def wait(self, deadline_s: float) -> int | None:
        with contextlib.suppress(DeadlineExceeded):
            async with self._clock.timeout(deadline_s, f"the end of {self.name}"):
                await self._ended.wait()
        return self.poll()

    def terminate(self) -> None:
        self._task.cancel()

    def kill(self) -> None:
        if self._code is None:
            self._code = -signal.SIGKILL
            self._task.cancel()

    async def send(self, frame: bytes, deadline_s: float = 10.0) -> None:
        if self._ended.is_set():
            raise PeerLost("the process has ended", where=self.name)
        self.channel.to_child.put_nowait(frame)

    async def recv(self, deadline_s: float) -> bytes:
        frames = self.channel.to_parent
        if frames.empty() and self._ended.is_set():
            raise PeerLost("the process has ended", where=self.name)
        async with self._clock.timeout(deadline_s, f"a frame of {self.name}"):
            return await frames.get()

    def close(self) -> None:
        """Do nothing: the channel is two queues."""

    def read_usage(self) -> ProcessUsage | None:
        return None if self._ended.is_set() else ProcessUsage(0.0, 0.0, "S")


class _SimulatedTicker:
    def __init__(
        self, clock: Clock, interval_s: float, fn: Callable[[], bool | None], name: str
    ) -> None:
        self._clock, self._interval_s, self._fn = clock, interval_s, fn
        self._task = asyncio.create_task(self._run(), name=name)

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s)
            if self._fn() is False:
                return

    def stop(self) -> None:
        self._task.cancel()


class SimulatedHost:
    """Host whose `spawn` runs `programs` by module name. `disk_bytes` bounds each append-only file.
    It may change at any time, as may the free space `left` and the `processors`.
    """

    def __init__(
        self,
        clock: Clock,
        random: Random,
        programs: Mapping[str, Program] | None = None,
        *,
        disk_bytes: int = -1,
    ) -> None:
        self._clock, self._random = clock, random
        self._programs = dict(programs or {})
        self.disk_bytes = disk_bytes
        self.left = AMPLE_SPACE
        self.processors = ProcessorUsage(0, 0.0)  # simulated programs take no processor time
        self.children: dict[int, SimulatedChild] = {}

    def spawn(
        self,
        argv: list[str],
        *,
        name: str,
        env: Mapping[str, str] = {},
        log: Path | None = None,
        options: SpawnOptions = DEFAULT_OPTIONS,
    ) -> SimulatedChild:
        module, arguments = (argv[2], argv[3:]) if argv[1:2] == ["-m"] else (argv[0], argv[1:])
        program = self._programs.get(module)
        if program is None:
            raise NotFound(
                f"no simulated program {module!r}", fix=f"there are {sorted(self._programs)}"
            )
        pid = len(self.children) + 1

        async def run(channel: SimulatedChannel) -> None:
            await program(arguments, channel)

        child = self.children[pid] = SimulatedChild(name, pid, self._clock, run)
        return child

    def adopt(
        self, pid: int, start_time: int, *, name: str, program: Sequence[str] = ()
    ) -> ChildProcess | None:
        child = self.children.get(pid)
        return child if child is not None and child.poll() is None else None

    def run_periodically(
        self, interval_s: float, fn: Callable[[], bool | None], name: str
    ) -> _SimulatedTicker:
        return _SimulatedTicker(self._clock, interval_s, fn, name)

    async def run_blocking(self, fn: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """Run a function at once on the loop: it takes no virtual time, and a seed determines the
        order.
        """
        return fn(*args)

    def open_append(self, path: Path) -> AppendFile:
        return AppendFile(path, lambda: self.disk_bytes)

    def replace_file(self, path: Path, content: bytes) -> None:
        replace_file(path, content)

    def exit(
        self, code: int, why: str, error: BaseException | None = None, job: str = ""
    ) -> NoReturn:
        raise SimulatedExit(code, why)

    def find_failure(self, pid: int, log: Path | None, code: int = 1) -> Failure | None:
        return self.children[pid].failure if code > 0 else None

    @property
    def identity(self) -> tuple[int, int]:
        return os.getpid(), read_own_start_time()

    def measure_free_space(self, directory: Path) -> FreeSpace:
        return self.left

    def measure_processors(self) -> ProcessorUsage:
        return self.processors

    def measure_usage(self) -> dict[str, float]:
        return {}


Test = Callable[..., Awaitable[object]]


def staged(stage: Callable[..., object], given: int = 1) -> Callable[[Test], Callable[..., None]]:
    """Make async tests run on a stage that passes their first `given` parameters. Pytest passes the
    others: fixtures and values of parametrized tests.
    """

    def decorate(test: Test) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            async def play(*scene: Any) -> None:
                await test(*scene, **fixtures)

            stage(play)

        signature = inspect.signature(test)
        ours = list(signature.parameters.values())[given:]
        run.__signature__ = signature.replace(parameters=ours)  # type: ignore[attr-defined]
        return run

    return decorate


virtual = staged(run_virtual, given=2)  # with a clock and random numbers, in virtual time
