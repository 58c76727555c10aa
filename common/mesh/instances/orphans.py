"""Detection of a process whose host's agent is gone, so that it belongs to no mesh."""

from __future__ import annotations

import asyncio

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry

POLL_S = 2.0
ORPHAN_TIMEOUT_S = 60.0  # an agent restarts within seconds
ORPHAN_OPTION_HELP = (
    "exit after the host has had no agent for this long; 0: never"  # help text of the option
)
REDIS_TIMEOUT_S = 5.0  # per lookup; Redis restarts in less


async def wait_until_orphaned(mesh: Mesh, timeout_s: float = ORPHAN_TIMEOUT_S) -> str:
    """Return the reason once this host has had no agent, or no Redis, for `timeout_s` seconds.

    Never return for 0, the value of processes that no agent started.
    """
    if not timeout_s:
        await asyncio.Event().wait()
    agent = f"node/{mesh.settings.host}"
    without_agent_s = without_redis_s = 0.0
    before = mesh.clock.monotonic()
    pause_s = min(POLL_S, timeout_s / 4)
    while True:
        try:
            async with mesh.clock.timeout(REDIS_TIMEOUT_S, "the lookup of the agent"):
                entry = await registry.lookup(mesh.state, agent)
            there, answered = entry is not None and entry.alive, True
        except (StateUnavailable, DeadlineExceeded):
            there = answered = False
        now = mesh.clock.monotonic()
        # In a longer pause no process ran here: the agent could not renew its lease either.
        elapsed_s, before = min(now - before, pause_s + REDIS_TIMEOUT_S), now
        without_redis_s = 0.0 if answered else without_redis_s + elapsed_s
        if answered:  # unknown while Redis is unavailable
            without_agent_s = 0.0 if there else without_agent_s + elapsed_s
        if without_redis_s > timeout_s:
            return f"Redis has not answered for {timeout_s:g} s"
        if without_agent_s > timeout_s:
            return f"{agent} has had no lease for {timeout_s:g} s"
        await mesh.clock.sleep(pause_s)
