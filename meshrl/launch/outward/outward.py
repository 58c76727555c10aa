"""`--health HOST:PORT`: the root process of a host answers for all of it.

`/livez`: its own event loop runs. `/readyz`: the host does its work, else the reason in words.
`/metrics`: the pages of all its processes in one, and at the head the mesh's own figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.telemetry.endpoint import MetricsEndpoint, health
from meshrl.launch.outward.host_page import HostPage
from meshrl.launch.outward.standing import LOOK_S, Standing
from meshrl.launch.root import RootProcess
from meshrl.view.metrics.mesh_gauges import read_head

SETTING = "--health"


@asynccontextmanager
async def outward(
    root: RootProcess,
    stop: asyncio.Event,
    where: str,
    head: bool,
    *,
    stall_s: float = MeshSettings.stall_s,
    look_s: float = LOOK_S,
) -> AsyncIterator[str]:
    """Answers at `where` (HOST:PORT; empty: nowhere) from before the host starts until it has
    ended; yields its address. `stall_s`: that its loop may stand still; `look_s`: between two looks
    at Redis. ConfigError when the port is taken.
    """
    if not where:
        yield ""
        return
    of_mesh = partial(read_head, place=root.place) if head else None
    standing = Standing(root, stop, of_mesh, stall_s, look_s)

    def metrics() -> str:
        return root.reached[1].metrics if root.reached is not None else ""

    name = "launcher" if head else "hosting"
    pages = {
        "/metrics": HostPage(name, standing, root.clock, metrics, root.place.root).page,
        "/livez": health(standing.not_live),
        "/readyz": health(standing.not_ready),
    }
    endpoint = MetricsEndpoint(where, "", root.host, pages, SETTING)
    tasks = [asyncio.create_task(standing.tick()), asyncio.create_task(standing.look())]
    try:
        yield endpoint.address
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        endpoint.close()
