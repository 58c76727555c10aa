"""Serial executor of blocking work in a thread: a cancelled caller's piece ends before the next
begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.mesh.runtime.mesh import Mesh

T = TypeVar("T")
STUCK_EXIT_STATUS = 70  # exit status of a process with a thread that outlived its deadline
NO_DEADLINE_S = 1e9  # a piece has no deadline: its waiters have


class SerialExecutor:
    """Thread for one piece of work at a time.

    The next piece waits up to `grace_s` seconds for one whose caller was cancelled, or whose
    deadline has passed. A piece that outlives this cannot be stopped: the process exits, and its
    worker restarts it.
    """

    def __init__(self, mesh: Mesh, grace_s: float) -> None:
        self._mesh, self._grace_s = mesh, grace_s
        self._task: asyncio.Task[Any] | None = None
        self._busy = asyncio.Lock()

    async def run(self, work: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """Run `work` and return its result.

        DeadlineExceeded and cancellation leave it running; see `wait_idle`.
        """
        async with self._busy:
            await self.wait_idle()
            running = self._mesh.host.run_blocking(work, *args, deadline_s=NO_DEADLINE_S)
            task = self._task = asyncio.create_task(running, name="serial executor")
            task.add_done_callback(consume_exception)
            async with self._mesh.clock.timeout(deadline_s, getattr(work, "__qualname__", "work")):
                return await asyncio.shield(task)

    async def wait_idle(self) -> None:
        """Wait until no piece of work runs; exit the process after `grace_s` seconds."""
        task = self._task
        if task is None or task.done():
            return
        try:
            async with self._mesh.clock.timeout(self._grace_s, "the rest of the background work"):
                await asyncio.wait([task])
        except DeadlineExceeded as error:
            self._mesh.host.exit(STUCK_EXIT_STATUS, str(error), error)


def consume_exception(task: asyncio.Task[Any]) -> None:
    """Mark a task's error as retrieved: its caller has received it, or was cancelled."""
    if not task.cancelled():
        task.exception()
