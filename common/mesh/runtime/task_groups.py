"""Groups of tasks that end together: remaining tasks are cancelled and awaited."""

from __future__ import annotations

import asyncio
from asyncio import Task
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def _run_group(work: Iterable[Coroutine[Any, Any, Any]]) -> AsyncIterator[list[Task[Any]]]:
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_all(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all coroutines concurrently.

    After an error or a cancellation the others are cancelled and awaited; the first error is
    raised.
    """
    async with _run_group(work) as tasks:
        await asyncio.gather(*tasks)


async def run_first(work: Iterable[Coroutine[Any, Any, Any]]) -> Any:
    """Run all coroutines concurrently; return or raise the outcome of the first to end.

    The others are cancelled and awaited.
    """
    async with _run_group(work) as tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return done.pop().result()
