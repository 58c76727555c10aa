"""Query of a running mesh through its Redis, within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import ConnectionError

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.embedded_server import redact_password
from meshrl.directory.directory_paths import MeshPaths, find_root_pid, format_path
from meshrl.directory.job_file import JOB_FILE_NAME

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


def make_not_running_error(mesh_paths: MeshPaths) -> StateUnavailable:
    """Return the error for a mesh whose root process does not run."""
    place, starts = format_path(mesh_paths.root), "`meshrl up` starts a mesh"
    if (mesh_paths.root / JOB_FILE_NAME).is_file():
        starts += f", `meshrl resume {place}` continues this run"
    return StateUnavailable(f"no mesh runs in {place}", fix=starts)


async def await_redis_answer(mesh_paths: MeshPaths, answer: Awaitable[T]) -> T:
    """Return the answer of a mesh's Redis; an absent one raises an error with a fix."""
    try:
        return await answer
    except StateUnavailable as error:
        is_gone = isinstance(error.__cause__, ConnectionError)
        if is_gone and not find_root_pid(mesh_paths):
            raise make_not_running_error(mesh_paths) from error
        raise StateUnavailable(
            f"the mesh's Redis is unavailable: {error.message}",
            where=redact_password(mesh_paths.redis_url),
            fix="Run `meshrl status --stalled` for the cause",
        ) from error
