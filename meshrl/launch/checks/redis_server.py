"""Checks that the Redis of $MESHRL_REDIS_URL takes commands, or that there is one to start."""

from __future__ import annotations

import asyncio

from meshrl.common.base.errors import ConfigError, StateUnavailable
from meshrl.common.state.redis import embedded
from meshrl.common.state.redis.client import State
from meshrl.job.loaded import JobFile
from meshrl.launch.redis.access.network import far_url
from meshrl.launch.redis.serving import server_for

CONNECT_S = 2.5  # a server in another country answers in less


def answers(_: JobFile) -> None:
    """The Redis of the mesh that is to be started."""
    usable()


def usable(listen: str = "") -> None:
    """ConfigError or StateUnavailable with the server's own words if it does not take commands; or
    if hosts that join, at `listen`, could not reach it safely.
    """
    url = embedded.configured_url()
    if not url:
        embedded.find_server()
        if listen:
            server_for(listen)
        return
    if listen:
        far_url(url, listen)
    try:
        asyncio.run(_ping(url))
    except (ConfigError, StateUnavailable) as error:
        raise type(error)(
            f"$MESHRL_REDIS_URL: {error.message}", where=error.where, fix=error.fix
        ) from error


async def _ping(url: str) -> None:
    state = await State.open(url, connect_s=CONNECT_S)
    await state.close()
