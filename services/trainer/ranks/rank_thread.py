"""Thread of a rank's arithmetic, which can end the waits of a lost collective."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from meshrl.common.api.ranks import FORM_TIMEOUT_S
from meshrl.common.base.errors import RankLost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import SerialExecutor, consume_exception
from meshrl.services.trainer.ranks.rank import is_collective_error

T = TypeVar("T")
TIMEOUT_MARGIN_S = 30.0


class RankThread(SerialExecutor):
    """Executor for work with collectives; past their deadline the process exits."""

    def __init__(self, mesh: Mesh, collective_timeout_s: float) -> None:
        super().__init__(mesh, collective_timeout_s + TIMEOUT_MARGIN_S)
        self._leave_task: asyncio.Task[None] | None = None

    async def run(self, work: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """Run `work` and return its result; RankLost if a collective of it fails."""

        @wraps(work)
        def run_and_translate(*args: Any) -> T:
            try:
                return work(*args)
            except RuntimeError as error:
                if is_collective_error(error):
                    raise RankLost(f"a collective failed: {error}") from error
                raise

        return await super().run(run_and_translate, *args, deadline_s=deadline_s)

    async def leave(self, leave: Callable[[], None]) -> None:
        """Run `leave`, which ends the group, beside current work; concurrent calls share a run."""
        if self._leave_task is None or self._leave_task.done():
            running = self._mesh.host.run_blocking(leave, deadline_s=FORM_TIMEOUT_S)
            self._leave_task = asyncio.create_task(running, name="leave")
            self._leave_task.add_done_callback(consume_exception)
        await asyncio.shield(self._leave_task)
