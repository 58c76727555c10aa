"""What is left on a host that drains: what was placed there and has not moved away."""

from __future__ import annotations

from common.state import registry
from common.state.pool.store import store as pool
from common.state.pool.workers.names import PLACED
from common.state.redis.client import State


async def remaining_on(state: State, host: str) -> list[str]:
    """Names of residents, of shards and sandboxes that are to be there, and of processes of such
    that live there.
    """
    workers = {worker.id for worker in await pool.workers(state) if worker.host == host}
    found = set(await pool.services_of(state, host))
    for gang in await pool.gangs(state):
        for resident in gang.residents:
            if workers.intersection(gang.workers[rank] for rank in resident.ranks):
                found.add(resident.id)
    entries = await registry.entries(state)
    found |= {e.name for e in entries if e.alive and e.host == host and e.kind in PLACED}
    return sorted(found)
