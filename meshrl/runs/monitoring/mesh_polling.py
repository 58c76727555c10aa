"""Polling of a mesh through its Redis, while the mesh may live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.command_target import may_be_running
from meshrl.directory.directory_paths import MeshPaths
from meshrl.view.recording.recorder import POLL_S, POLL_TIMEOUT_S

T = TypeVar("T")
SILENCE_LIMIT_S = 15.0  # of silence before the mesh's existence is checked


async def poll_mesh(
    place: MeshPaths,
    report: Callable[[str], None],
    make_poll: Callable[[StateClient], Callable[[], Awaitable[T]]],
) -> AsyncGenerator[T, None]:
    """Yield polls of a mesh for as long as it lives; `make_poll` makes the poll of a connection."""
    while True:
        try:
            state = await StateClient.open(place.redis_url, connect_timeout_s=POLL_TIMEOUT_S)
            try:
                look = make_poll(state)
                while True:
                    async with asyncio.timeout(SILENCE_LIMIT_S):
                        found = await look()
                    yield found
                    await asyncio.sleep(POLL_S)
            finally:
                await state.close()
        except TimeoutError:  # is the mesh still there?
            pass
        except (StateUnavailable, DeadlineExceeded):
            report("Redis does not answer; retrying")
        await asyncio.sleep(POLL_S)
        if not await asyncio.to_thread(may_be_running, place):
            return
