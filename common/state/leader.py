"""Leader election: there is at most one leader, and its token fences its writes."""

from __future__ import annotations

from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX


async def campaign(state: StateClient, election: str, owner: str, ttl_ms: int) -> int:
    """Return the fencing token if `owner`, which names one start of a process, leads; else 0."""
    args = {"election": election, "owner": owner, "ttl_ms": ttl_ms}
    return int((await state.run_mesh_script("campaign", **args))["token"])


def renew_leadership(state: StateClient, election: str, token: int, ttl_ms: int) -> bool:
    """Prolong leadership; False if it has lapsed. Blocks, for the renewal thread."""
    args = {"election": election, "token": token, "ttl_ms": ttl_ms}
    return bool(state.run_script_sync("renew_leadership", [MESH_PREFIX], args)["is_renewed"])


async def read_leader(state: StateClient, election: str) -> tuple[str, int]:
    """Return (owner, token) of the current leader; ("", 0) if there is none."""
    answer = await state.run_mesh_script("leader", election=election)
    return answer["owner"], int(answer["token"])
