"""A virtual process: tasks of the loop that end, stop and go on together.

What is killed runs nothing more: its handles are dropped, what it awaits never returns, and none of
its clean-up happens.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from meshrl.common.mesh.process.ends.failure import Failure
from meshrl.sim.loop import OWNER

if TYPE_CHECKING:
    from meshrl.sim.machine import Machine

Program = Callable[["VirtualProcess", list[str]], Awaitable[None]]


class Exited(BaseException):
    """What ends the task that calls `Host.exit`: past every `except Exception`."""


class VirtualChannel:
    """The frames between a process and its parent; None ends a direction."""

    def __init__(self) -> None:
        self.to_child: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.to_parent: asyncio.Queue[bytes | None] = asyncio.Queue()


class VirtualProcess:
    def __init__(
        self,
        machine: Machine,
        pid: int,
        name: str,
        argv: list[str],
        parent: VirtualProcess | None,
        *,
        tied: bool = True,
    ) -> None:
        """`tied`: it dies with its parent."""
        self.machine, self.pid, self.name, self.argv = machine, pid, name, argv
        self.parent, self.tied = parent, tied
        self.running = True
        self.code: int | None = None
        self.failure: Failure | None = None  # the error that ended it
        self.over = asyncio.Event()
        self.channel = VirtualChannel()
        self.at_end: list[Callable[[], None]] = []  # what the kernel does for it
        self.at_stop: list[Callable[[bool], None]] = []  # told True when stopped, False when not
        self.context = Context()
        self.context.run(OWNER.set, self)
        self._main: asyncio.Task[None] | None = None
        self._parked: list[asyncio.Handle] = []
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._graceful = False

    @property
    def ended(self) -> bool:
        return self.code is not None

    @property
    def stopped(self) -> bool:
        return not self.running and self.code is None

    @property
    def label(self) -> str:
        return f"{self.name}({self.pid})"

    @property
    def kind(self) -> str:
        """What it is, whatever its number."""
        return self.name.partition("/")[0].partition("-")[0]

    # -- its life --------------------------------------------------------------------------------

    def begin(self, program: Program, *, graceful: bool = True) -> None:
        """`graceful`: the first SIGTERM cancels the program, which then cleans up."""
        self._graceful = graceful
        self.machine.record.say(f"start {self.label} {' '.join(self.argv)}")
        loop = asyncio.get_running_loop()
        life = self._life(program)
        self._main = loop.create_task(life, name=self.name, context=self.context)

    async def _life(self, program: Program) -> None:
        code = 0
        try:
            await program(self, self.argv)
        except asyncio.CancelledError:
            pass
        except Exited:
            return
        except Exception as error:
            self.machine.died(self, error)
            self.failure = Failure.of(error)
            code = 1
        current = asyncio.current_task()
        rest = [task for task in self._tasks if task is not current and not task.done()]
        for task in sorted(rest, key=hash):
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        self.end(code)

    def end(self, code: int) -> None:
        if self.ended:
            return
        self.code, self.running = code, False
        self.machine.record.say(f"end {self.label} {code}")
        self.machine.graveyard += [task for task in self._tasks if not task.done()]
        self._parked.clear()
        for action in self.at_end:
            action()
        self.channel.to_parent.put_nowait(None)
        self.over.set()
        for child in self.machine.children_of(self):
            if child.tied:
                child.end(-signal.SIGKILL)

    # -- signals ---------------------------------------------------------------------------------

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def terminate(self) -> None:
        if self.ended:
            return
        if self._graceful and self._main is not None:
            self._graceful = False
            self._main.cancel()
        else:
            self.end(-signal.SIGTERM)

    def stop(self) -> None:
        if self.running:
            self.running = False
            self.machine.record.say(f"stop {self.label}")
            for told in self.at_stop:
                told(True)

    def resume(self) -> None:
        if self.stopped:
            self.running = True
            self.machine.record.say(f"resume {self.label}")
            for told in self.at_stop:
                told(False)
            parked, self._parked = self._parked, []
            for handle in parked:
                self.machine.loop.again(handle)

    # -- what the loop asks ----------------------------------------------------------------------

    def park(self, handle: asyncio.Handle) -> None:
        if not self.ended:
            self._parked.append(handle)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """One that begins when the process has ended is what its last callback would clean up."""
        if self.ended:
            self.machine.graveyard.append(task)
        self._tasks.add(task)
