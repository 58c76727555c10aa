"""Looks at a mesh through its Redis, again and again, while the mesh may live."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.base.errors import DeadlineExceeded, StateUnavailable
from common.state.redis.client import State
from meshrl.directory.places import MeshPlace
from meshrl.directory.target import may_live
from meshrl.view.live.view import Saying
from meshrl.view.recording.recorder import ANSWER_S, LOOK_S

T = TypeVar("T")
GONE_S = 15.0  # of silence before it is asked whether the mesh is still there


async def looked(
    place: MeshPlace,
    view: Saying,
    looking: Callable[[State], Callable[[], Awaitable[tuple[T, bool]]]],
    last: T,
) -> T:
    """What was seen last, when that was the end or the mesh lives no more; `last` if nothing was.
    Of each connection `looking` makes a look, which returns what it sees and whether it is the end.
    """
    while True:
        try:
            state = await State.open(place.redis_url, connect_s=ANSWER_S)
            try:
                look = looking(state)
                while True:
                    async with asyncio.timeout(GONE_S):
                        last, over = await look()
                    if over:
                        return last
                    await asyncio.sleep(LOOK_S)
            finally:
                await state.close()
        except TimeoutError:  # is the mesh still there?
            pass
        except (StateUnavailable, DeadlineExceeded):
            view.say("redis does not answer; asking again")
        await asyncio.sleep(LOOK_S)
        if not await asyncio.to_thread(may_live, place):
            return last
