"""The end of a job's records: deleted by a person, or by the leader once they are old."""

from __future__ import annotations

from contextlib import suppress

from meshrl.common.base.errors import NotFound, Refused
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX, PLANNER_ELECTION, job_prefix

ROWS_PER_SCRIPT = 500  # that one script removes: some 2 ms of Redis
MAX_JOBS = 4  # that the leader deletes at a time: it has more to do
DAY_MS = 86_400_000
PENDING_STORE_KEY = f"{MESH_PREFIX}:jobs:in_store"
DELETED_JOBS_KEY = f"{MESH_PREFIX}:jobs:deleted"


async def delete_job(state: StateClient, job: str, op_id: str, requester: str = "a person") -> None:
    """Removes all that Redis holds of a job, once for `op_id`; the event `deleted` tells of it.
    What lies in its run's directory stays; weights that only the store has go.

    Refused unless the job has ended, NotFound when the mesh has none of that name. Who is cut
    off in between leaves the rest to the leader.
    """
    await state.run_job_script("delete_job", job, op=op_id, by=requester)
    await _delete_remaining_rows(state, job)


async def was_deleted(state: StateClient, job: str, op_id: str) -> bool:
    """Whether `delete` has removed a job for `op_id`: known for minutes at least, also when another
    has its name by now.
    """
    return bool(await state.run_command("EXISTS", f"{job_prefix(job)}:op:delete_job:{op_id}"))


async def delete_old_jobs(state: StateClient, token: int, retention_days: float) -> list[str]:
    """Deletes jobs that ended so long ago, some of them, and what others have begun to delete; the
    names of the former. Fenced for a leader that is no longer one.
    """
    args = {
        "election": PLANNER_ELECTION,
        "token": token,
        "keep_ms": int(retention_days * DAY_MS),
        "most": MAX_JOBS,
    }
    found = await state.run_mesh_script("old_jobs", **args)
    for job in found["begun"] or []:
        await _delete_remaining_rows(state, job)
    old: list[str] = found["old"] or []
    for job in old:
        with suppress(NotFound, Refused):  # a person was faster, and deleted it or took it up again
            await delete_job(state, job, f"old.{token}", requester="age")
    return old


async def read_deleted_jobs(state: StateClient) -> list[str]:
    """Jobs that were deleted, the last ten thousand of them."""
    return list(await state.run_command("ZRANGE", DELETED_JOBS_KEY, 0, -1) or [])


async def read_pending_store_deletions(state: StateClient) -> list[str]:
    """Jobs that were deleted and of which the weight store may still keep something: it lets go of
    that, and says so (`let_go`). Until then, or for ten minutes, nobody gets their names.
    """
    return list(await state.run_command("ZRANGE", PENDING_STORE_KEY, 0, -1) or [])


async def confirm_store_deletion(state: StateClient, job: str) -> None:
    """The weight store keeps nothing of a deleted job any more."""
    await state.run_command("ZREM", PENDING_STORE_KEY, job)


async def _delete_remaining_rows(state: StateClient, job: str) -> None:
    while (await state.run_job_script("delete_rest", job, most=ROWS_PER_SCRIPT))["more"]:
        pass
