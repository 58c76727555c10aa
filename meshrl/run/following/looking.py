"""Looks at a mesh through its Redis, again and again, while the mesh may live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.state.redis.client import State
from meshrl.directory.places import MeshPlace
from meshrl.directory.target import may_live
from meshrl.view.recording.recorder import ANSWER_S, LOOK_S

T = TypeVar("T")
GONE_S = 15.0  # of silence before it is asked whether the mesh is still there


async def looks(
    place: MeshPlace,
    say: Callable[[str], None],
    looking: Callable[[State], Callable[[], Awaitable[T]]],
) -> AsyncGenerator[T, None]:
    """What is seen of a mesh, look by look, for as long as it lives. `looking` makes the looks of
    one connection.
    """
    while True:
        try:
            state = await State.open(place.redis_url, connect_s=ANSWER_S)
            try:
                look = looking(state)
                while True:
                    async with asyncio.timeout(GONE_S):
                        found = await look()
                    yield found
                    await asyncio.sleep(LOOK_S)
            finally:
                await state.close()
        except TimeoutError:  # is the mesh still there?
            pass
        except (StateUnavailable, DeadlineExceeded):
            say("redis does not answer; asking again")
        await asyncio.sleep(LOOK_S)
        if not await asyncio.to_thread(may_live, place):
            return
