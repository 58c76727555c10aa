"""The first error of any task that works for a job: it ends the work of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Broken:
    """Set by the task that fails, seen by the one that the others work for."""

    def __init__(self) -> None:
        self._error: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        """Says why the work cannot go on; the first who says it is heard."""
        if not self._error.done():
            self._error.set_exception(error)
            self._error.exception()  # it is told to whoever guards, if anybody does

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end, or until an error is said, which is raised."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait([task, self._error], return_when=asyncio.FIRST_COMPLETED)
            if self._error.done():
                self._error.result()
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])
