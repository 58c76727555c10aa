"""A rank's arithmetic on a thread: one piece at a time. What a collective still holds after a rank
was lost is waited for before the next piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from common.api.ranks import FORM_S
from common.errors import DeadlineExceeded, RankLost
from common.mesh import Mesh
from services.trainer.ranks import of_the_group

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
        self._leaving: asyncio.Task[None] | None = None
        self._busy = asyncio.Lock()

    async def run(self, work: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """What `work` returns; RankLost when a collective of it fails. Being cancelled meanwhile
        leaves it running: see `ended`.
        """
        async with self._busy:
            await self.ended()
            running = self._mesh.host.run_blocking(_told(work), *args, deadline_s=deadline_s)
            task = self._task = asyncio.create_task(running, name="rank")
            task.add_done_callback(_looked_at)
            return await asyncio.shield(task)

    async def leave(self, leave: Callable[[], None]) -> None:
        """Runs `leave`, which ends the group, beside what runs; once for all who ask meanwhile."""
        if self._leaving is None or self._leaving.done():
            running = self._mesh.host.run_blocking(leave, deadline_s=FORM_S)
            self._leaving = asyncio.create_task(running, name="leave")
            self._leaving.add_done_callback(_looked_at)
        await asyncio.shield(self._leaving)

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


def _told(work: Callable[..., T]) -> Callable[..., T]:
    """As `work`, whose errors tell a rank that is lost from a mistake of this one."""

    @wraps(work)
    def run(*args: Any) -> T:
        try:
            return work(*args)
        except RuntimeError as error:
            if of_the_group(error):
                raise RankLost(f"a collective failed: {error}") from error
            raise

    return run


def _looked_at(task: asyncio.Task[Any]) -> None:
    """Its error was told to whoever waited, or to nobody if that one has gone."""
    if not task.cancelled():
        task.exception()
