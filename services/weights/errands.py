"""Work with files at a run's home that takes as long as they have bytes. It goes on when whoever
asked for it has given up, and who asks again joins it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from common.base.errors import MeshError, Refused
from common.mesh.runtime.mesh import Mesh

T = TypeVar("T")
ANSWER_S = 20.0  # until who asked hears that it goes on; well below the deadlines of the calls
STALL_S = 600.0  # without a byte: a disk may sync a gigabyte for minutes, and no step is longer
KEPT_S = 60.0  # that an outcome is kept for one who asks again
LOOK_S = 5.0  # between looks whether bytes have moved
LONGEST_S = 30 * 86400.0  # of a piece of work that moves bytes; what stalls ends it


class TaskProgress:
    """What a piece of work has done: its thread counts bytes, the loop looks at them."""

    def __init__(self) -> None:
        self.bytes = 0
        self.over = False  # nobody waits for it any more

    def __call__(self, moved: int) -> None:
        """Refused once nobody waits: the thread ends at its next block."""
        if self.over:
            raise Refused("it was given up")
        self.bytes += moved


class Errands:
    """The pieces of work that go on."""

    def __init__(self, mesh: Mesh, answer_s: float = ANSWER_S, stall_s: float = STALL_S) -> None:
        self._mesh, self._answer_s, self._stall_s = mesh, answer_s, stall_s
        self._running: dict[Hashable, asyncio.Task[Any]] = {}

    async def joined(self, key: Hashable, work: Callable[[TaskProgress], T], what: str) -> T | None:
        """The result of `work`, which is done once for all who ask by one `key` meanwhile; None
        while it goes on: ask again. MeshError when it stands still, and what it raises.
        """
        if key not in self._running:
            task = asyncio.create_task(self._done(work, what), name=what)
            self._running[key] = task
            task.add_done_callback(lambda ended: self._ended(key, ended))
        task = self._running[key]
        await asyncio.wait([task], timeout=self._answer_s)
        if not task.done():
            return None
        self._forget(key, task)
        found: T = task.result()
        return found

    async def stop(self) -> None:
        """Ends all."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        task.get_loop().call_later(KEPT_S, self._forget, key, task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mesh.telemetry.log.warning(task.get_name(), error=str(error))

    def _forget(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        if self._running.get(key) is task:
            del self._running[key]

    async def _done(self, work: Callable[[TaskProgress], T], what: str) -> T:
        progress, clock = TaskProgress(), self._mesh.clock
        run = self._mesh.host.run_blocking(work, progress, deadline_s=LONGEST_S)
        running = asyncio.ensure_future(run)
        seen, since = 0, clock.monotonic()
        try:
            while not running.done():
                await asyncio.wait([running], timeout=min(LOOK_S, self._stall_s))
                if progress.bytes != seen:
                    seen, since = progress.bytes, clock.monotonic()
                elif not running.done() and clock.monotonic() - since >= self._stall_s:
                    raise MeshError(
                        f"no byte of {what} has moved for {self._stall_s:g} s, after {seen}",
                        where=self._mesh.name,
                        fix="See whether the disk there answers",
                    )
            return running.result()
        finally:
            progress.over = True
            running.cancel()
