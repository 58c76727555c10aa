"""Runs tasks as a group, which ends as one: those that are left are cancelled and waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def all_of(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Runs all coroutines at once. After an error or a cancellation the others are cancelled and
    waited for; the first error is raised.
    """
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(work: Iterable[Coroutine[Any, Any, Any]]) -> Any:
    """Runs all coroutines at once: what the first one to end returns, or raises. The others are
    cancelled and waited for.
    """
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return done.pop().result()
