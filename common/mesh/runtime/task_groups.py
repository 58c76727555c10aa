"""Runs tasks as a group, which ends as one: those that are left are cancelled and waited for."""

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
    """Runs all coroutines at once. After an error or a cancellation the others are cancelled and
    waited for; the first error is raised.
    """
    async with _run_group(work) as tasks:
        await asyncio.gather(*tasks)


async def run_first(work: Iterable[Coroutine[Any, Any, Any]]) -> Any:
    """Runs all coroutines at once: what the first one to end returns, or raises. The others are
    cancelled and waited for.
    """
    async with _run_group(work) as tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return done.pop().result()
