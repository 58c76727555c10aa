"""Query of a running mesh through its Redis, within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.embedded_server import redact_password
from meshrl.directory.directory_paths import MeshPaths

T = TypeVar("T")
ANSWER_TIMEOUT_S = 10.0


def query_mesh(
    mesh_paths: MeshPaths, query: Callable[[StateClient], Awaitable[T]], deadline_s: float
) -> T:
    """Run `query` on the mesh's Redis.

    Raises StateUnavailable or the query's own error after `deadline_s`.
    """

    async def run_query() -> T:
        try:
            async with asyncio.timeout(deadline_s):
                state = await StateClient.open(mesh_paths.redis_url, connect_timeout_s=deadline_s)
                try:
                    return await query(state)
                finally:
                    await state.close()
        except (TimeoutError, DeadlineExceeded) as error:
            raise StateUnavailable(f"no answer within {deadline_s:g} s") from error

    return asyncio.run(await_redis_answer(mesh_paths, run_query()))


async def await_redis_answer(mesh_paths: MeshPaths, answer: Awaitable[T]) -> T:
    """Return the answer of a mesh's Redis; an absent one raises an error with a fix."""
    try:
        return await answer
    except StateUnavailable as error:
        raise StateUnavailable(
            f"the mesh's Redis is unavailable: {error.message}",
            where=redact_password(mesh_paths.redis_url),
            fix="Run `meshrl up` to start a mesh, or `meshrl resume RUN` to restart the mesh "
            "of a run",
        ) from error
