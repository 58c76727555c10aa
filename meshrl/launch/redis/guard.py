"""Guards the mesh's own Redis: starts it, sends a PING each second, kills it when it stays
silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, RedisError, ResponseError

from common.base.clock import Clock
from common.base.errors import StateUnavailable
from common.mesh.process.ends.failure import tail
from common.mesh.process.handle import Child
from common.state.redis import embedded

INTERVAL_S = 1.0
ANSWER_S = 2.0
SILENCES = 4  # in a row, 2 s each: 8 s without an answer, and it is killed and started again
START_S = 20.0  # reading its append-only file may take a while
NO_ANSWER = (RedisError, OSError, TimeoutError)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def answers(url: str) -> bool:
    """One PING. Any answer is one, that of a server that still loads its data too, or of one whose
    disk is full: killing it would help nobody.
    """
    task = asyncio.current_task()
    asked = task.cancelling() if task else 0
    try:
        await _ping(url)
        heard = True
    except (BusyLoadingError, ResponseError):
        heard = True
    except NO_ANSWER:
        heard = False
    if task and task.cancelling() > asked:
        raise asyncio.CancelledError  # redis-py swallows one that comes as the bytes leave
    return heard


async def _ping(url: str) -> None:
    client = Redis.from_url(url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S)
    try:
        async with asyncio.timeout(ANSWER_S):
            await client.ping()
    finally:
        with contextlib.suppress(RedisError, OSError):
            await client.aclose()


async def wait_until_ready(url: str, clock: Clock, child: Child | None, log: Path | None) -> None:
    """Returns when Redis takes commands; StateUnavailable with the end of its log otherwise."""
    until = clock.monotonic() + START_S
    while clock.monotonic() < until and (child is None or child.poll() is None):
        try:
            return await _ping(url)
        except NO_ANSWER:
            await clock.sleep(0.03)
    said = " / ".join(tail(log, 3)) if log else ""
    fix = f"Its log {log} ends: {said}" if log else "See what $MESHRL_REDIS_URL names"
    where = embedded.without_password(url)
    raise StateUnavailable("Redis does not start", where=where, fix=fix)


async def watch(url: str, clock: Clock, child: list[Child]) -> None:
    """Kills the Redis in `child` (the newest is last) when it stays silent; never returns.

    Silences are counted, not timed: a launcher that was stopped itself must not blame Redis.
    """
    silent: tuple[int, int] = (0, 0)  # pid, silences in a row
    while True:
        await clock.sleep(INTERVAL_S)
        server = child[-1]
        heard = await answers(url)
        silent = (server.pid, 0 if heard else 1 + (silent[1] if silent[0] == server.pid else 0))
        if silent[1] >= SILENCES and server.poll() is None:
            server.kill()
            silent = (server.pid, 0)
