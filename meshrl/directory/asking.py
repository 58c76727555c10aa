"""Asks a running mesh something through its Redis, within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.state.redis.client import State
from meshrl.common.state.redis.embedded import without_password
from meshrl.directory.places import MeshPlace

T = TypeVar("T")
ANSWER_S = 10.0


def ask(place: MeshPlace, question: Callable[[State], Awaitable[T]], deadline_s: float) -> T:
    """Runs `question` on the mesh's Redis; StateUnavailable or its own error after `deadline_s`."""

    async def asking() -> T:
        try:
            async with asyncio.timeout(deadline_s):
                state = await State.open(place.redis_url, connect_s=deadline_s)
                try:
                    return await question(state)
                finally:
                    await state.close()
        except (TimeoutError, DeadlineExceeded) as error:
            raise StateUnavailable(f"no answer within {deadline_s:g} s") from error

    return asyncio.run(answered(place, asking()))


async def answered(place: MeshPlace, question: Awaitable[T]) -> T:
    """Return the answer of a mesh's Redis; one that is away is named with what to do."""
    try:
        return await question
    except StateUnavailable as error:
        raise StateUnavailable(
            f"the mesh's Redis cannot be asked: {error.message}",
            where=without_password(place.redis_url),
            fix="`meshrl up` starts a mesh; `meshrl resume RUN` starts the mesh of a run again",
        ) from error
