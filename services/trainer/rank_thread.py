"""A rank's arithmetic on a thread: one piece at a time. What a collective still holds after a rank
was lost is waited for before the next piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from common.errors import DeadlineExceeded
from common.mesh import Mesh

T = TypeVar("T")
STUCK = 70  # exit status of a process with a thread that neither abort nor deadline has ended
MARGIN_S = 30.0


class RankThread:
    """`group_s` is the deadline of the group's collectives. A thread that outlives it ends the
    process, and its worker starts it again.
    """

    def __init__(self, mesh: Mesh, group_s: float) -> None:
        self._mesh, self._patience_s = mesh, group_s + MARGIN_S
        self._task: asyncio.Task[Any] | None = None
        self._busy = asyncio.Lock()

    async def run(self, work: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """What `work` returns. Being cancelled meanwhile leaves it running: see `ended`."""
        async with self._busy:
            await self.ended()
            running = self._mesh.host.run_blocking(work, *args, deadline_s=deadline_s)
            task = self._task = asyncio.create_task(running, name="rank")
            task.add_done_callback(_looked_at)
            return await asyncio.shield(task)

    async def ended(self) -> None:
        """Until no piece of work runs any more."""
        task = self._task
        if task is None or task.done():
            return
        try:
            async with self._mesh.clock.timeout(self._patience_s, "an aborted collective"):
                await asyncio.wait([task])
        except DeadlineExceeded as error:
            self._mesh.host.exit(STUCK, str(error))


def _looked_at(task: asyncio.Task[Any]) -> None:
    """Its error was told to whoever waited, or to nobody if that one has gone."""
    if not task.cancelled():
        task.exception()
