"""What takes a rank longer than a call may last: it is asked for again until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from meshrl.common.base.errors import RankLost
from meshrl.common.mesh.runtime.serial_executor import looked_at

T = TypeVar("T")
ANSWER_S = 60.0  # until who asked hears that it goes on; well below the deadlines of the calls


class Errand(Generic[T]):
    """One at a time; its result stays until another one, or `close`."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._key: Hashable = None
        self._task: asyncio.Task[T] | None = None

    async def asked(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Return what `work`, begun once for a `key`, does; None while it goes on; RankLost."""
        if self._task is None or key != self._key:
            await self.close()
            self._key, self._task = key, asyncio.create_task(work(), name="errand")
            self._task.add_done_callback(looked_at)
        task = self._task
        await asyncio.wait([task], timeout=self._answer_s)
        if task.cancelled():
            raise RankLost("what was asked for was given up")
        return task.result() if task.done() else None

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
