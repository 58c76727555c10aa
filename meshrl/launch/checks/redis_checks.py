"""Checks that the Redis of $MESHRL_REDIS_URL takes commands, or that a server can be started."""

from __future__ import annotations

import asyncio

from meshrl.common.base.errors import ConfigError, StateUnavailable
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.job.job_file import JobFile
from meshrl.launch.redis.access.redis_network import resolve_remote_url
from meshrl.launch.redis.redis_configuration import find_server_for

CONNECT_TIMEOUT_S = 2.5  # a server in another country answers in less


def check_redis(_: JobFile) -> None:
    """Check the Redis of the mesh that is to be started."""
    require_usable_redis()


def require_usable_redis(listen: str = "") -> None:
    """Check that Redis takes commands, and that joining hosts can reach it safely at `listen`.

    Raises ConfigError or StateUnavailable with the server's own words.
    """
    url = embedded_server.read_configured_url()
    if not url:
        embedded_server.find_server()
        if listen:
            find_server_for(listen)
        return
    if listen:
        resolve_remote_url(url, listen)
    try:
        asyncio.run(_ping(url))
    except (ConfigError, StateUnavailable) as error:
        raise type(error)(
            f"$MESHRL_REDIS_URL: {error.message}", where=error.where, fix=error.fix
        ) from error


async def _ping(url: str) -> None:
    state = await StateClient.open(url, connect_timeout_s=CONNECT_TIMEOUT_S)
    await state.close()
