"""The end of a job's records: deleted by a person, or by the leader once they are old."""

from __future__ import annotations

from contextlib import suppress

from meshrl.common.base.errors import NotFound, Refused
from meshrl.common.state.redis.client import State
from meshrl.common.state.redis.keys import MESH, PLANNER, job_prefix

ROWS = 500  # that one script removes: some 2 ms of Redis
JOBS = 4  # that the leader deletes at a time: it has more to do
DAY_MS = 86_400_000
IN_STORE = f"{MESH}:jobs:in_store"
DELETED = f"{MESH}:jobs:deleted"


async def delete(state: State, job: str, op: str, by: str = "a person") -> None:
    """Removes all that Redis holds of a job, once for `op`; the event `deleted` tells of it. What
    lies in its run's directory stays; weights that only the store has go.

    Refused unless the job has ended, NotFound when the mesh has none of that name. Who is cut
    off in between leaves the rest to the leader.
    """
    await state.run_job("delete_job", job, op=op, by=by)
    await _delete_rest(state, job)


async def was_deleted(state: State, job: str, op: str) -> bool:
    """Whether `delete` has removed a job for `op`: known for minutes at least, also when another
    has its name by now.
    """
    return bool(await state.command("EXISTS", f"{job_prefix(job)}:op:delete_job:{op}"))


async def delete_old(state: State, token: int, keep_days: float) -> list[str]:
    """Deletes jobs that ended so long ago, some of them, and what others have begun to delete; the
    names of the former. Fenced for a leader that is no longer one.
    """
    args = {"election": PLANNER, "token": token, "keep_ms": int(keep_days * DAY_MS), "most": JOBS}
    found = await state.run_mesh("old_jobs", **args)
    for job in found["begun"] or []:
        await _delete_rest(state, job)
    old: list[str] = found["old"] or []
    for job in old:
        with suppress(NotFound, Refused):  # a person was faster, and deleted it or took it up again
            await delete(state, job, f"old.{token}", by="age")
    return old


async def names(state: State) -> list[str]:
    """Jobs that were deleted, the last ten thousand of them."""
    return list(await state.command("ZRANGE", DELETED, 0, -1) or [])


async def in_store(state: State) -> list[str]:
    """Jobs that were deleted and of which the weight store may still keep something: it lets go of
    that, and says so (`let_go`). Until then, or for ten minutes, nobody gets their names.
    """
    return list(await state.command("ZRANGE", IN_STORE, 0, -1) or [])


async def let_go(state: State, job: str) -> None:
    """The weight store keeps nothing of a deleted job any more."""
    await state.command("ZREM", IN_STORE, job)


async def _delete_rest(state: State, job: str) -> None:
    while (await state.run_job("delete_rest", job, most=ROWS))["more"]:
        pass
