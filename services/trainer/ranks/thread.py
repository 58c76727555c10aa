"""Runs a rank's arithmetic on a thread, one piece at a time. What a collective still holds after a
rank was lost is waited for before the next piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from common.api.ranks import FORM_S
from common.base.errors import RankLost
from common.mesh.runtime.mesh import Mesh
from common.mesh.runtime.serial_executor import SerialExecutor, looked_at
from services.trainer.ranks.rank import of_the_group

T = TypeVar("T")
MARGIN_S = 30.0


class RankThread(SerialExecutor):
    """`group_s` is the deadline of the group's collectives. A thread that neither abort nor this
    has ended ends the process.
    """

    def __init__(self, mesh: Mesh, group_s: float) -> None:
        super().__init__(mesh, group_s + MARGIN_S)
        self._leaving: asyncio.Task[None] | None = None

    async def run(self, work: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """What `work` returns; RankLost when a collective of it fails."""
        return await super().run(_told(work), *args, deadline_s=deadline_s)

    async def leave(self, leave: Callable[[], None]) -> None:
        """Runs `leave`, which ends the group, beside what runs; once for all who ask meanwhile."""
        if self._leaving is None or self._leaving.done():
            running = self._mesh.host.run_blocking(leave, deadline_s=FORM_S)
            self._leaving = asyncio.create_task(running, name="leave")
            self._leaving.add_done_callback(looked_at)
        await asyncio.shield(self._leaving)


def _told(work: Callable[..., T]) -> Callable[..., T]:
    """`work`, with errors that tell a lost rank from a mistake of this one."""

    @wraps(work)
    def run(*args: Any) -> T:
        try:
            return work(*args)
        except RuntimeError as error:
            if of_the_group(error):
                raise RankLost(f"a collective failed: {error}") from error
            raise

    return run
