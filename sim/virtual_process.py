"""Virtual process: tasks of the loop that end, stop and continue together.

A killed process runs no more code. Its callbacks are dropped, its awaits never return, and its
clean-up does not run.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from meshrl.common.mesh.process.diagnosis.failure import Failure
from meshrl.sim.virtual_loop import CURRENT_OWNER

if TYPE_CHECKING:
    from meshrl.sim.virtual_machine import VirtualMachine

VirtualProgram = Callable[["VirtualProcess", list[str]], Awaitable[None]]


class ProcessExit(BaseException):
    """Exception that ends the task of a `Host.exit` call; no `except Exception` catches it."""


class VirtualChannel:
    """Frames between a process and its parent; None ends a direction."""

    def __init__(self) -> None:
        self.to_child: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.to_parent: asyncio.Queue[bytes | None] = asyncio.Queue()


class VirtualProcess:
    def __init__(
        self,
        machine: VirtualMachine,
        pid: int,
        name: str,
        argv: list[str],
        parent: VirtualProcess | None,
        *,
        dies_with_parent: bool = True,
    ) -> None:
        """Create a process. `dies_with_parent`: it exits with its parent."""
        self.machine, self.pid, self.name, self.argv = machine, pid, name, argv
        self.parent, self.dies_with_parent = parent, dies_with_parent
        self.is_running = True
        self.exit_code: int | None = None
        self.failure: Failure | None = None  # the error that ended it
        self.exited = asyncio.Event()
        self.channel = VirtualChannel()
        self.exit_callbacks: list[Callable[[], None]] = []  # clean-up by the kernel
        self.stop_callbacks: list[
            Callable[[bool], None]
        ] = []  # called with True when it is stopped, False when it continues
        self.context = Context()
        self.context.run(CURRENT_OWNER.set, self)
        self._main: asyncio.Task[None] | None = None
        self._parked: list[asyncio.Handle] = []
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._is_graceful = False

    @property
    def has_exited(self) -> bool:
        return self.exit_code is not None

    @property
    def is_stopped(self) -> bool:
        return not self.is_running and self.exit_code is None

    @property
    def label(self) -> str:
        return f"{self.name}({self.pid})"

    @property
    def kind(self) -> str:
        """Kind of the process, without its number."""
        return self.name.partition("/")[0].partition("-")[0]

    # -- life cycle ------------------------------------------------------------------------------

    def start(self, program: VirtualProgram, *, graceful: bool = True) -> None:
        """Start the program. `graceful`: the first SIGTERM cancels the program, which then cleans
        up.
        """
        self._is_graceful = graceful
        self.machine.record.log_event(f"start {self.label} {' '.join(self.argv)}")
        loop = asyncio.get_running_loop()
        life = self._run(program)
        self._main = loop.create_task(life, name=self.name, context=self.context)

    async def _run(self, program: VirtualProgram) -> None:
        code = 0
        try:
            await program(self, self.argv)
        except asyncio.CancelledError:
            pass
        except ProcessExit:
            return
        except Exception as error:
            self.machine.record_failure(self, error)
            self.failure = Failure.from_error(error)
            code = 1
        current = asyncio.current_task()
        rest = [task for task in self._tasks if task is not current and not task.done()]
        for task in sorted(rest, key=hash):
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        self.exit(code)

    def exit(self, code: int) -> None:
        if self.has_exited:
            return
        self.exit_code, self.is_running = code, False
        self.machine.record.log_event(f"end {self.label} {code}")
        self.machine.dead_tasks += [task for task in self._tasks if not task.done()]
        self._parked.clear()
        for action in self.exit_callbacks:
            action()
        self.channel.to_parent.put_nowait(None)
        self.exited.set()
        for child in self.machine.find_children(self):
            if child.dies_with_parent:
                child.exit(-signal.SIGKILL)

    # -- signals ---------------------------------------------------------------------------------

    def kill(self) -> None:
        self.exit(-signal.SIGKILL)

    def terminate(self) -> None:
        if self.has_exited:
            return
        if self._is_graceful and self._main is not None:
            self._is_graceful = False
            self._main.cancel()
        else:
            self.exit(-signal.SIGTERM)

    def stop(self) -> None:
        if self.is_running:
            self.is_running = False
            self.machine.record.log_event(f"stop {self.label}")
            for callback in self.stop_callbacks:
                callback(True)

    def resume(self) -> None:
        if self.is_stopped:
            self.is_running = True
            self.machine.record.log_event(f"resume {self.label}")
            for callback in self.stop_callbacks:
                callback(False)
            parked, self._parked = self._parked, []
            for handle in parked:
                self.machine.loop.requeue(handle)

    # -- calls of the loop -----------------------------------------------------------------------

    def park(self, handle: asyncio.Handle) -> None:
        if not self.has_exited:
            self._parked.append(handle)

    def add_task(self, task: asyncio.Task[Any]) -> None:
        """Add a task. A task that starts after the exit would be clean-up, and is only retained."""
        if self.has_exited:
            self.machine.dead_tasks.append(task)
        self._tasks.add(task)
