"""A virtual machine: its processes, its clock, its disk, and the `Host` that each process sees."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from meshrl.common.base.errors import DeadlineExceeded, MeshError, NotFound, PeerLost, StorageFull
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.cores import Cores
from meshrl.common.mesh.process.ends.failure import Failure
from meshrl.common.mesh.process.ends.limits import Room
from meshrl.common.mesh.process.handle import UNKNOWN_EXIT, Usage
from meshrl.common.mesh.process.host import replace_file
from meshrl.common.mesh.process.starting import PLAIN, Spawning
from meshrl.sim.disk import Disk
from meshrl.sim.loop import OWNER, VirtualClock, VirtualLoop
from meshrl.sim.process import Exited, Program, VirtualProcess
from meshrl.sim.record import EventRecord

T = TypeVar("T")
PLENTY = Room(memory=1 << 40, disk=1 << 40)
GRACELESS = {"meshrl.services.environment"}  # programs that a SIGTERM ends at once


def takes(seconds: float | str) -> Callable[[T], T]:
    """Declares the virtual time of a function that is run off the loop; a name: that its object
    has it.
    """

    def mark(function: T) -> T:
        function.takes_s = seconds  # type: ignore[attr-defined]
        return function

    return mark


class MachineClock(VirtualClock):
    """Its wall time may be set to anything, and jump."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(loop)
        self.offset_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.offset_s


class Machine:
    def __init__(self, loop: VirtualLoop, random: Random, record: EventRecord, root: Path) -> None:
        self.loop, self.random, self.record = loop, random, record
        self.clock = MachineClock(loop)
        self.disk = Disk(root)
        self.programs: dict[str, Program] = {}
        self.processes: dict[int, VirtualProcess] = {}
        self.graveyard: list[asyncio.Task[Any]] = []  # of dead processes: never to be collected
        self.failures: list[str] = []  # errors that ended a process
        self.meetings: dict[str, Any] = {}  # process groups of ranks, by where they meet
        self._files: dict[int, list[AppendFile]] = {}

    @property
    def alive(self) -> list[VirtualProcess]:
        return [process for process in self.processes.values() if not process.ended]

    def children_of(self, parent: VirtualProcess) -> list[VirtualProcess]:
        return [process for process in self.alive if process.parent is parent]

    def spawn(
        self, module: str, argv: list[str], name: str, parent: VirtualProcess | None, tied: bool
    ) -> VirtualProcess:
        program = self.programs.get(module)
        if program is None:
            known = f"there are {sorted(self.programs)}"
            raise NotFound(f"no virtual program {module!r}", fix=known)
        pid = len(self.processes) + 1
        process = self.processes[pid] = VirtualProcess(self, pid, name, argv, parent, tied=tied)
        process.begin(program, graceful=module not in GRACELESS)
        return process

    def died(self, process: VirtualProcess, error: Exception) -> None:
        told = "".join(traceback.format_exception(error))
        self.record.note(f"{process.label} fails: {told}")
        if not isinstance(error, MeshError):  # those are typed, and a restart is their cure
            self.failures.append(f"{process.label}: {type(error).__name__}: {error}")

    def open_files(self) -> list[str]:
        """Names of append files that nobody has closed, whose process has ended."""
        return [str(f.path) for files in self._files.values() for f in files if f.open]

    def files_of(self, process: VirtualProcess) -> list[AppendFile]:
        files = self._files.get(process.pid)
        if files is None:
            files = self._files[process.pid] = []

            def close() -> None:
                for file in files:
                    file.close()

            process.at_end.append(close)
        return files


class VirtualChild:
    """A process as its parent has it, or whoever adopted it."""

    def __init__(self, process: VirtualProcess, clock: VirtualClock, adopted: bool) -> None:
        self.name, self.pid, self.start_time = process.name, process.pid, process.pid
        self._process, self._clock, self._adopted = process, clock, adopted

    def poll(self) -> int | None:
        code = self._process.code
        return UNKNOWN_EXIT if code is not None and self._adopted else code

    async def wait(self, deadline_s: float) -> int | None:
        if self._process.code is None and deadline_s > 0:
            try:
                async with self._clock.timeout(deadline_s, f"the end of {self.name}"):
                    await self._process.over.wait()
            except DeadlineExceeded:
                return self.poll()
        return self.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    async def send(self, frame: bytes, deadline_s: float = 10.0) -> None:
        if self._process.ended:
            raise PeerLost("the process has ended", where=self.name)
        self._process.channel.to_child.put_nowait(frame)

    async def recv(self, deadline_s: float) -> bytes:
        frames = self._process.channel.to_parent
        async with self._clock.timeout(deadline_s, f"a frame of {self.name}"):
            frame = await frames.get()
        if frame is None:
            frames.put_nowait(None)
            raise PeerLost("the process has ended", where=self.name)
        return frame

    def close(self) -> None:
        self._process.channel.to_child.put_nowait(None)

    def usage(self) -> Usage | None:
        if self._process.ended:
            return None
        return Usage(0.0, 0.0, "S" if self._process.running else "T")


class Ticker:
    """Calls a function at intervals, as a thread of the process would."""

    def __init__(
        self,
        loop: VirtualLoop,
        interval_s: float,
        fn: Callable[[], bool | None],
        record: EventRecord,
    ) -> None:
        self._loop, self._interval_s, self._fn, self._record = loop, interval_s, fn, record
        self._timer = loop.call_later(interval_s, self._fire)

    def _fire(self) -> None:
        try:
            again = self._fn() is not False
        except Exception:  # as a thread prints it, and goes on
            self._record.note(traceback.format_exc())
            again = True
        if again:
            self._timer = self._loop.call_later(self._interval_s, self._fire)

    def stop(self) -> None:
        self._timer.cancel()


class ProcessHost:
    """The `Host` of one process."""

    def __init__(self, process: VirtualProcess) -> None:
        self._process, self._machine = process, process.machine
        self._random = self._machine.random.child(f"host {process.label}")

    def _alive(self) -> None:
        """What is unwound after the end of its process has no effect."""
        if self._process.ended:
            raise Exited

    def spawn(
        self,
        argv: list[str],
        *,
        name: str,
        env: Mapping[str, str] = {},
        log: Path | None = None,
        how: Spawning = PLAIN,
    ) -> VirtualChild:
        self._alive()
        module, arguments = (argv[2], argv[3:]) if argv[1:2] == ["-m"] else (argv[0], argv[1:])
        child = self._machine.spawn(module, arguments, name, self._process, how.die_with_parent)
        return VirtualChild(child, self._machine.clock, adopted=False)

    def adopt(
        self, pid: int, start_time: int, *, name: str, program: Sequence[str] = ()
    ) -> VirtualChild | None:
        process = self._machine.processes.get(pid)
        if process is None or process.ended:
            return None
        return VirtualChild(process, self._machine.clock, adopted=True)

    def every(self, interval_s: float, fn: Callable[[], bool | None], name: str) -> Ticker:
        return Ticker(self._machine.loop, interval_s, fn, self._machine.record)

    async def run_blocking(self, fn: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """What declares how long it takes is run after that time; anything else at once, and the
        disk makes its caller wait. Who is cancelled leaves it running, as a thread is left.
        """
        self._alive()
        wait_s = self._random.expovariate(1 / self._machine.disk.slow_s)
        declared_s: Any = getattr(fn, "takes_s", None)
        if isinstance(declared_s, str):
            declared_s = getattr(inspect.unwrap(fn).__self__, declared_s)
        if declared_s is None:
            try:
                with self._machine.disk.writing():
                    found = fn(*args)
            finally:
                if not self._process.ended:
                    await self._machine.clock.sleep(wait_s)
            if not inspect.isawaitable(found):
                return found
            rest: Awaitable[Any] = found
        else:
            rest = self._work(fn, args, wait_s + declared_s * self._random.uniform(0.7, 1.3))
        work = asyncio.ensure_future(rest)
        work.add_done_callback(lambda task: task.cancelled() or task.exception())
        async with self._machine.clock.timeout(deadline_s, getattr(fn, "__qualname__", "work")):
            return await asyncio.shield(work)

    async def _work(self, fn: Callable[..., Any], args: tuple[Any, ...], wait_s: float) -> Any:
        await self._machine.clock.sleep(wait_s)
        with self._machine.disk.writing():
            found = fn(*args)
        return await found if inspect.isawaitable(found) else found

    def open_append(self, path: Path) -> AppendFile:
        self._alive()
        if self._machine.disk.full:
            raise StorageFull("no room for a new file", where=str(path))
        file = AppendFile(path, self._machine.disk.bound)
        self._machine.files_of(self._process).append(file)
        return file

    def replace_file(self, path: Path, content: bytes) -> None:
        self._alive()
        self._machine.disk.check()
        with self._machine.disk.writing():
            replace_file(path, content)

    def failure_of(self, pid: int, log: Path | None, code: int = 1) -> Failure | None:
        process = self._machine.processes.get(pid)
        return None if process is None or code < 0 else process.failure

    def exit(
        self, code: int, why: str, error: BaseException | None = None, job: str = ""
    ) -> NoReturn:
        self._machine.record.note(f"{self._process.label} exits {code}: {why}")
        if error is not None:
            self._process.failure = Failure.of(error, job)
        self._process.end(code)
        raise Exited

    @property
    def identity(self) -> tuple[int, int]:
        return self._process.pid, self._process.pid

    def room(self, directory: Path) -> Room:
        return PLENTY._replace(disk=0) if self._machine.disk.full else PLENTY

    def cores(self) -> Cores:
        return Cores(0, 0.0)  # what runs here takes no time of a processor

    def usage(self) -> dict[str, float]:
        return {}


def owner() -> VirtualProcess:
    found = OWNER.get()
    assert isinstance(found, VirtualProcess)
    return found
