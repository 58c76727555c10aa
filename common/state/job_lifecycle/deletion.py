"""Deletion of a job's records, by a user, or by the leader once they are old."""

from __future__ import annotations

from contextlib import suppress

from meshrl.common.base.errors import NotFound, Refused
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX, PLANNER_ELECTION, job_prefix

ROWS_PER_SCRIPT = 500  # limit that takes Redis about 2 ms
MAX_JOBS = 4  # limit of one call, as the leader has other work
DAY_MS = 86_400_000
PENDING_STORE_KEY = f"{MESH_PREFIX}:jobs:in_store"
DELETED_JOBS_KEY = f"{MESH_PREFIX}:jobs:deleted"


async def delete_job(state: StateClient, job: str, op_id: str, requester: str = "a person") -> None:
    """Delete all that Redis holds of a job, once for `op_id`; the event is `deleted`.

    Files in its run's directory stay; weights that only the store has are deleted. Refused unless
    the job has ended, NotFound if the mesh has none of that name. If the caller stops in between,
    the leader deletes the rest.
    """
    await state.run_job_script("delete_job", job, op=op_id, by=requester)
    await _delete_remaining_rows(state, job)


async def was_deleted(state: StateClient, job: str, op_id: str) -> bool:
    """Return True if `delete_job` has deleted a job for `op_id`.

    The answer holds for some minutes at least, also when another job has the name by now.
    """
    return bool(await state.run_command("EXISTS", f"{job_prefix(job)}:op:delete_job:{op_id}"))


async def delete_old_jobs(state: StateClient, token: int, retention_days: float) -> list[str]:
    """Delete some of the jobs that ended `retention_days` ago, and return their names.

    Also complete deletions that others have begun. Fenced for a former leader.
    """
    args = {
        "election": PLANNER_ELECTION,
        "token": token,
        "keep_ms": int(retention_days * DAY_MS),
        "most": MAX_JOBS,
    }
    found = await state.run_mesh_script("old_jobs", **args)
    for job in found["unfinished"] or []:
        await _delete_remaining_rows(state, job)
    old: list[str] = found["old"] or []
    for job in old:
        with suppress(NotFound, Refused):  # a user has deleted or resumed it first
            await delete_job(state, job, f"old.{token}", requester="age")
    return old


async def read_deleted_jobs(state: StateClient) -> list[str]:
    """Return the deleted jobs, at most the last ten thousand."""
    return list(await state.run_command("ZRANGE", DELETED_JOBS_KEY, 0, -1) or [])


async def read_pending_store_deletions(state: StateClient) -> list[str]:
    """Return deleted jobs of which the weight store may still hold data.

    The store deletes that data and calls `confirm_store_deletion`. Until then, or for ten minutes,
    no job can have their names.
    """
    return list(await state.run_command("ZRANGE", PENDING_STORE_KEY, 0, -1) or [])


async def confirm_store_deletion(state: StateClient, job: str) -> None:
    """Record that the weight store holds nothing more of a deleted job."""
    await state.run_command("ZREM", PENDING_STORE_KEY, job)


async def _delete_remaining_rows(state: StateClient, job: str) -> None:
    while (await state.run_job_script("delete_remaining_rows", job, most=ROWS_PER_SCRIPT))["more"]:
        pass
