"""Virtual machine: its processes, its clock, its disk, and the `Host` of each process."""

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
from meshrl.common.mesh.process.child_handle import UNKNOWN_EXIT_STATUS, ProcessUsage
from meshrl.common.mesh.process.diagnosis.failure import Failure
from meshrl.common.mesh.process.diagnosis.host_limits import FreeSpace
from meshrl.common.mesh.process.host import replace_file
from meshrl.common.mesh.process.processor_usage import ProcessorUsage
from meshrl.common.mesh.process.spawning import DEFAULT_OPTIONS, SpawnOptions
from meshrl.sim.event_record import EventRecord
from meshrl.sim.virtual_disk import VirtualDisk
from meshrl.sim.virtual_loop import CURRENT_OWNER, VirtualClock, VirtualLoop
from meshrl.sim.virtual_process import ProcessExit, VirtualProcess, VirtualProgram

T = TypeVar("T")
AMPLE_SPACE = FreeSpace(memory_bytes=1 << 40, disk_bytes=1 << 40)
UNGRACEFUL_PROGRAMS = {"meshrl.services.environment"}  # a SIGTERM ends these programs at once


def virtual_duration(seconds: float | str) -> Callable[[T], T]:
    """Declare the virtual duration of a blocking function; a name selects an attribute of its
    object.
    """

    def mark(function: T) -> T:
        function.takes_s = seconds  # type: ignore[attr-defined]
        return function

    return mark


class MachineClock(VirtualClock):
    """Clock whose wall time may be set to any value, and jump."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(loop)
        self.offset_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.offset_s


class VirtualMachine:
    def __init__(self, loop: VirtualLoop, random: Random, record: EventRecord, root: Path) -> None:
        self.loop, self.random, self.record = loop, random, record
        self.clock = MachineClock(loop)
        self.disk = VirtualDisk(root)
        self.free_space: FreeSpace | None = None  # None: ample
        self.programs: dict[str, VirtualProgram] = {}
        self.processes: dict[int, VirtualProcess] = {}
        self.dead_tasks: list[asyncio.Task[Any]] = []  # of dead processes: never to be collected
        self.failures: list[str] = []  # errors that ended a process
        self.process_groups: dict[str, Any] = {}  # process groups of ranks, by rendezvous
        self._append_files: dict[int, list[AppendFile]] = {}

    @property
    def live_processes(self) -> list[VirtualProcess]:
        return [process for process in self.processes.values() if not process.has_exited]

    def find_children(self, parent: VirtualProcess) -> list[VirtualProcess]:
        return [process for process in self.live_processes if process.parent is parent]

    def spawn(
        self,
        module: str,
        argv: list[str],
        name: str,
        parent: VirtualProcess | None,
        dies_with_parent: bool,
    ) -> VirtualProcess:
        program = self.programs.get(module)
        if program is None:
            known = f"Use one of {sorted(self.programs)}"
            raise NotFound(f"no virtual program {module!r}", fix=known)
        pid = len(self.processes) + 1
        process = self.processes[pid] = VirtualProcess(
            self, pid, name, argv, parent, dies_with_parent=dies_with_parent
        )
        process.start(program, graceful=module not in UNGRACEFUL_PROGRAMS)
        return process

    def record_failure(self, process: VirtualProcess, error: Exception) -> None:
        traceback_text = "".join(traceback.format_exception(error))
        self.record.log_note(f"{process.label} fails: {traceback_text}")
        if not isinstance(error, MeshError):  # MeshErrors are typed, and handled by a restart
            self.failures.append(f"{process.label}: {type(error).__name__}: {error}")

    def list_unclosed_files(self) -> list[str]:
        """List the names of append files left open by ended processes."""
        return [str(f.path) for files in self._append_files.values() for f in files if f.is_open]

    def get_append_files(self, process: VirtualProcess) -> list[AppendFile]:
        files = self._append_files.get(process.pid)
        if files is None:
            files = self._append_files[process.pid] = []

            def close() -> None:
                for file in files:
                    file.close()

            process.exit_callbacks.append(close)
        return files


class VirtualChild:
    """Child process for its parent, or for the process that adopted it."""

    def __init__(self, process: VirtualProcess, clock: VirtualClock, is_adopted: bool) -> None:
        self.name, self.pid, self.start_time = process.name, process.pid, process.pid
        self._process, self._clock, self._is_adopted = process, clock, is_adopted

    def poll(self) -> int | None:
        code = self._process.exit_code
        return UNKNOWN_EXIT_STATUS if code is not None and self._is_adopted else code

    async def wait(self, deadline_s: float) -> int | None:
        if self._process.exit_code is None and deadline_s > 0:
            try:
                async with self._clock.timeout(deadline_s, f"the exit of {self.name}"):
                    await self._process.exited.wait()
            except DeadlineExceeded:
                return self.poll()
        return self.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    async def send(self, frame: bytes, deadline_s: float = 10.0) -> None:
        if self._process.has_exited:
            raise PeerLost("the process has ended", where=self.name)
        self._process.channel.to_child.put_nowait(frame)

    async def recv(self, deadline_s: float) -> bytes:
        frames = self._process.channel.to_parent
        async with self._clock.timeout(deadline_s, f"receiving a frame of {self.name}"):
            frame = await frames.get()
        if frame is None:
            frames.put_nowait(None)
            raise PeerLost("the process has ended", where=self.name)
        return frame

    def close(self) -> None:
        self._process.channel.to_child.put_nowait(None)

    def read_usage(self) -> ProcessUsage | None:
        if self._process.has_exited:
            return None
        return ProcessUsage(0.0, 0.0, "S" if self._process.is_running else "T")


class VirtualTicker:
    """Ticker that calls a function at intervals, as a thread of the process would."""

    def __init__(
        self,
        loop: VirtualLoop,
        interval_s: float,
        callback: Callable[[], bool | None],
        record: EventRecord,
    ) -> None:
        self._loop, self._interval_s, self._callback, self._record = (
            loop,
            interval_s,
            callback,
            record,
        )
        self._timer = loop.call_later(interval_s, self._tick)

    def _tick(self) -> None:
        try:
            again = self._callback() is not False
        except Exception:  # as in a thread: print it and continue
            self._record.log_note(traceback.format_exc())
            again = True
        if again:
            self._timer = self._loop.call_later(self._interval_s, self._tick)

    def stop(self) -> None:
        self._timer.cancel()


class VirtualHost:
    """`Host` of one process."""

    def __init__(self, process: VirtualProcess) -> None:
        self._process, self._machine = process, process.machine
        self._random = self._machine.random.child(f"host {process.label}")

    def _check_alive(self) -> None:
        """Check that the process lives; unwinding code of an exited process must have no effect."""
        if self._process.has_exited:
            raise ProcessExit

    def spawn(
        self,
        argv: list[str],
        *,
        name: str,
        env: Mapping[str, str] = {},
        log: Path | None = None,
        options: SpawnOptions = DEFAULT_OPTIONS,
    ) -> VirtualChild:
        self._check_alive()
        module, arguments = (argv[2], argv[3:]) if argv[1:2] == ["-m"] else (argv[0], argv[1:])
        child = self._machine.spawn(module, arguments, name, self._process, options.die_with_parent)
        return VirtualChild(child, self._machine.clock, is_adopted=False)

    def adopt(
        self, pid: int, start_time: int, *, name: str, program: Sequence[str] = ()
    ) -> VirtualChild | None:
        process = self._machine.processes.get(pid)
        if process is None or process.has_exited:
            return None
        return VirtualChild(process, self._machine.clock, is_adopted=True)

    def run_periodically(
        self, interval_s: float, fn: Callable[[], bool | None], name: str
    ) -> VirtualTicker:
        return VirtualTicker(self._machine.loop, interval_s, fn, self._machine.record)

    async def run_blocking(self, fn: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """Run a blocking function after its declared duration; without one run it at once, then
        wait for the disk. A cancelled caller does not stop the function, as with a thread.
        """
        self._check_alive()
        wait_s = self._random.expovariate(1 / self._machine.disk.mean_delay_s)
        declared_s: Any = getattr(fn, "takes_s", None)
        if isinstance(declared_s, str):
            declared_s = getattr(inspect.unwrap(fn).__self__, declared_s)
        if declared_s is None:
            try:
                with self._machine.disk.limit_writes():
                    found = fn(*args)
            finally:
                if not self._process.has_exited:
                    await self._machine.clock.sleep(wait_s)
            if not inspect.isawaitable(found):
                return found
            rest: Awaitable[Any] = found
        else:
            rest = self._run_delayed(fn, args, wait_s + declared_s * self._random.uniform(0.7, 1.3))
        work = asyncio.ensure_future(rest)
        work.add_done_callback(lambda task: task.cancelled() or task.exception())
        async with self._machine.clock.timeout(deadline_s, getattr(fn, "__qualname__", "work")):
            return await asyncio.shield(work)

    async def _run_delayed(
        self, fn: Callable[..., Any], args: tuple[Any, ...], wait_s: float
    ) -> Any:
        await self._machine.clock.sleep(wait_s)
        with self._machine.disk.limit_writes():
            found = fn(*args)
        return await found if inspect.isawaitable(found) else found

    def open_append(self, path: Path) -> AppendFile:
        self._check_alive()
        if self._machine.disk.is_full:
            raise StorageFull("the disk has no space for a new file", where=str(path))
        file = AppendFile(path, self._machine.disk.get_max_file_bytes)
        self._machine.get_append_files(self._process).append(file)
        return file

    def replace_file(self, path: Path, content: bytes) -> None:
        self._check_alive()
        self._machine.disk.check_has_space()
        with self._machine.disk.limit_writes():
            replace_file(path, content)

    def find_failure(self, pid: int, log: Path | None, code: int = 1) -> Failure | None:
        process = self._machine.processes.get(pid)
        return None if process is None or code < 0 else process.failure

    def exit(
        self, code: int, why: str, error: BaseException | None = None, job: str = ""
    ) -> NoReturn:
        self._machine.record.log_note(f"{self._process.label} exits {code}: {why}")
        if error is not None:
            self._process.failure = Failure.from_error(error, job)
        self._process.exit(code)
        raise ProcessExit

    @property
    def identity(self) -> tuple[int, int]:
        return self._process.pid, self._process.pid

    def measure_free_space(self, directory: Path) -> FreeSpace:
        free_space = self._machine.free_space or AMPLE_SPACE
        return free_space._replace(disk_bytes=0) if self._machine.disk.is_full else free_space

    def measure_processors(self) -> ProcessorUsage:
        return ProcessorUsage(0, 0.0)  # simulated work uses no processor time

    def measure_usage(self) -> dict[str, float]:
        return {}


def get_current_process() -> VirtualProcess:
    found = CURRENT_OWNER.get()
    assert isinstance(found, VirtualProcess)
    return found
