"""The mesh epoch: how often Redis was away for longer than a lease.

Leases that were live when Redis went must not change hands because of it. The first to return
raises the epoch, once per outage, which gives every such lease a grace of ten seconds; within it
everyone renews or registers again and keeps its token. `registry.renew` does all of this by itself,
from how long Redis gave it no answer.
"""

from __future__ import annotations

from common.state.redis.client import State
from common.state.redis.keys import MESH


async def mesh_epoch(state: State) -> int:
    """The number of outages so far that outlasted a lease."""
    return int(await state.command("GET", f"{MESH}:epoch") or 0)
