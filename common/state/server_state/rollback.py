"""Whether a Redis is older than what lies outside it tells: restored from a copy, cut short, or on
a disk that lied.

How far a state has come is a `StateWatermark`. What Redis holds is compared with what the launcher
noted, the recorder wrote down, and checkpoints and ledgers mention: an older Redis would number
versions, groups and fencing tokens a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from meshrl.common.state.events import parse_event_id
from meshrl.common.state.redis.client import StateClient, read_server_time_ms
from meshrl.common.state.redis.keys import EVENTS, MESH_PREFIX, TRIMMED_KEY

TOKEN_KEY = f"{MESH_PREFIX}:token"
# More tokens than are issued between two notes of the launcher, a second apart; few enough that the
# counter, which begins at the milliseconds of the clock, stays within the 14 digits of Lua.
TOKEN_GAP = 10_000
FIRST_EVENT_ID = "0-0"


@dataclass(frozen=True)
class JobWatermark:
    """How far a job has come: its newest version is `version` of `lineage`; `next_group` and all
    above are free.
    """

    lineage: int = -1
    version: int = -1
    next_group: int = 0
    run_dir: str = ""
    phase: str = ""

    @property
    def has_begun(self) -> bool:
        """Whether it has had a version or a group."""
        return self.version >= 0 or self.next_group > 0


@dataclass(frozen=True)
class StateWatermark:
    """How far the state of a mesh has come; of what lies outside Redis, at least so far."""

    event: str = FIRST_EVENT_ID  # id of the newest event
    token: int = 0  # the highest fencing token that was issued
    jobs: Mapping[str, JobWatermark] = field(default_factory=dict)
    deleted: Mapping[str, int] = field(default_factory=dict)  # jobs that are known, and when, in ms

    @property
    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return self.event == FIRST_EVENT_ID and not self.token and not self.jobs


def merge_watermarks(watermarks: list[StateWatermark]) -> StateWatermark:
    """As far as any of them has come."""
    jobs: dict[str, JobWatermark] = {}
    for mark in watermarks:
        for job, one in mark.jobs.items():
            was = jobs.get(job, JobWatermark())
            version = max((was.lineage, was.version), (one.lineage, one.version))
            next_group = max(was.next_group, one.next_group)
            about = one.run_dir or was.run_dir, one.phase or was.phase
            jobs[job] = JobWatermark(*version, next_group, *about)
    event = max((mark.event for mark in watermarks), key=parse_event_id, default=FIRST_EVENT_ID)
    return StateWatermark(event, max((mark.token for mark in watermarks), default=0), jobs)


def explain_rollback(
    current: StateWatermark, expected: StateWatermark, lost_jobs: Collection[str] = ()
) -> str:
    """Why what Redis holds is older than what is known; empty when it is not. Jobs that are
    `lost_jobs` need not be there: an earlier Redis was lost with them, and they were not put back.

    A lineage may begin below the versions of the one before it, so versions count within one.
    """
    if current.is_empty and not expected.is_empty:
        return "it is empty"
    for job, one in expected.jobs.items():
        here = current.jobs.get(job)
        if here is None:
            if one.version >= 0 and job not in lost_jobs and job not in current.deleted:
                return f"it does not know the job {job}"
            continue
        if (here.lineage, here.version) < (one.lineage, one.version):
            return (
                f"{job} is at version {here.version} of lineage {here.lineage} there, and was at "
                f"version {one.version} of lineage {one.lineage}"
            )
        if here.next_group < one.next_group:
            return (
                f"the next group of {job} is {here.next_group} there, and group "
                f"{one.next_group - 1} has been opened"
            )
    if parse_event_id(current.event) < parse_event_id(expected.event):
        return f"its newest event of those that were seen is {current.event}, not {expected.event}"
    if current.token < expected.token:
        return f"its fencing tokens end at {current.token}, and {expected.token} has been issued"
    return ""


async def read_watermark(state: StateClient, expected: StateWatermark) -> StateWatermark:
    """What Redis holds, to be compared with `expected`.

    Where newer events have been added to an older stream, `event` is the newest that is not after
    the one that is known: that one itself, if the stream has it or had it when it was trimmed.
    """
    rows = (
        await _read_newest_event(state, expected.event) if expected.event != FIRST_EVENT_ID else []
    )
    rows = rows or await _read_newest_event(state, "+")
    trimmed = str(await state.run_command("GET", TRIMMED_KEY) or FIRST_EVENT_ID)
    event = max(rows[0][0] if rows else FIRST_EVENT_ID, trimmed, key=parse_event_id)
    token = int(await state.run_command("GET", TOKEN_KEY) or 0)
    rows = await state.run_mesh_script("job_marks", known=list(expected.jobs))
    jobs = {row.pop("job"): JobWatermark(**row) for row in rows["jobs"] or []}
    deleted = {row["job"]: row["at_ms"] for row in rows["deleted"] or []}
    return StateWatermark(event, token, jobs, deleted)


async def _read_newest_event(state: StateClient, end: str) -> list[list[str]]:
    rows: list[list[str]] = await state.run_command("XREVRANGE", EVENTS, end, "-", "COUNT", 1) or []
    return rows


def drop_deleted_jobs(watermark: StateWatermark, deleted: Collection[str]) -> StateWatermark:
    """What is known but for jobs that were deleted: another may have the name of one of them."""
    jobs = {job: one for job, one in watermark.jobs.items() if job not in deleted}
    return StateWatermark(watermark.event, watermark.token, jobs)


def compute_token_floor(*marks: StateWatermark) -> int:
    """A fencing token above every one that was issued when or shortly after these were taken."""
    return max(mark.token for mark in marks) + TOKEN_GAP


async def raise_token_floor(state: StateClient, floor: int) -> None:
    """Every token that is issued from now on is above `floor`; the first in an empty state above
    the milliseconds of the clock too, as without a floor. Before anybody registers.
    """
    issued = int(await state.run_command("GET", TOKEN_KEY) or 0)
    least = floor if issued else max(floor, int(await read_server_time_ms(state)))
    if issued < least:
        await state.run_command("SET", TOKEN_KEY, least)
