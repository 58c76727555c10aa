"""Leader election: there is at most one leader, and its token fences what it writes."""

from __future__ import annotations

from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX


async def campaign(state: StateClient, election: str, owner: str, ttl_ms: int) -> int:
    """The fencing token if `owner`, which names one start of a process, leads; else 0."""
    args = {"election": election, "owner": owner, "ttl_ms": ttl_ms}
    return int((await state.run_mesh_script("campaign", **args))["token"])


def renew_leadership(state: StateClient, election: str, token: int, ttl_ms: int) -> bool:
    """Prolongs leadership; False when it has lapsed. Blocks, for the renewal thread."""
    args = {"election": election, "token": token, "ttl_ms": ttl_ms}
    return bool(state.run_script_sync("keep", [MESH_PREFIX], args)["held"])


async def read_leader(state: StateClient, election: str) -> tuple[str, int]:
    """(owner, token) of who leads now; ("", 0) when nobody does."""
    answer = await state.run_mesh_script("leader", election=election)
    return answer["owner"], int(answer["token"])
