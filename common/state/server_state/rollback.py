"""Detection of a Redis whose state is older than records outside it.

Causes are a restored copy, a truncated file, or a disk that lost writes. A `StateWatermark` is how
far a state has come. The state of Redis is compared with the launcher's notes, the recorder's
records, checkpoints and ledgers. An older Redis would issue numbers of versions, groups and fencing
tokens a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from meshrl.common.state.events import parse_event_id
from meshrl.common.state.redis.client import StateClient, read_server_time_ms
from meshrl.common.state.redis.keys import EVENTS, MESH_PREFIX, TRIMMED_KEY

TOKEN_KEY = f"{MESH_PREFIX}:token"
# More tokens than are issued between two notes of the launcher, one second apart. Few enough that
# the counter, which begins at the clock's milliseconds, stays within the 14 digits of Lua.
TOKEN_GAP = 10_000
FIRST_EVENT_ID = "0-0"


@dataclass(frozen=True)
class JobWatermark:
    """Progress of a job: newest `version` of `lineage`; groups from `next_group` on are unused."""

    lineage: int = -1
    version: int = -1
    next_group: int = 0
    run_dir: str = ""
    phase: str = ""

    @property
    def has_begun(self) -> bool:
        """True if the job has had a version or a group."""
        return self.version >= 0 or self.next_group > 0


@dataclass(frozen=True)
class StateWatermark:
    """Progress of a mesh's state; a lower bound where it comes from records outside Redis."""

    event: str = FIRST_EVENT_ID  # id of the newest event
    token: int = 0  # highest fencing token issued
    jobs: Mapping[str, JobWatermark] = field(default_factory=dict)
    deleted: Mapping[str, int] = field(default_factory=dict)  # time of deletion by job, in ms

    @property
    def is_empty(self) -> bool:
        """True if nothing has happened."""
        return self.event == FIRST_EVENT_ID and not self.token and not self.jobs


def merge_watermarks(watermarks: list[StateWatermark]) -> StateWatermark:
    """Return the furthest progress of all watermarks."""
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
    """Return why the state of Redis is older than the expected one; empty if it is not.

    `lost_jobs` may be absent: they were lost with an earlier Redis and were not restored. A lineage
    may begin below the versions of the one before it, so versions are compared within a lineage.
    """
    if current.is_empty and not expected.is_empty:
        return "it is empty"
    for job, one in expected.jobs.items():
        here = current.jobs.get(job)
        if here is None:
            if one.version >= 0 and job not in lost_jobs and job not in current.deleted:
                return f"it has no job {job}"
            continue
        if (here.lineage, here.version) < (one.lineage, one.version):
            return (
                f"it has {job} at version {here.version} of lineage {here.lineage}, not at "
                f"version {one.version} of lineage {one.lineage}"
            )
        if here.next_group < one.next_group:
            return (
                f"its next group of {job} is {here.next_group}, but group {one.next_group - 1} "
                "has been opened"
            )
    if parse_event_id(current.event) < parse_event_id(expected.event):
        return f"its newest known event is {current.event}, not {expected.event}"
    if current.token < expected.token:
        return f"its fencing tokens end at {current.token}, but {expected.token} has been issued"
    return ""


async def read_watermark(state: StateClient, expected: StateWatermark) -> StateWatermark:
    """Return the progress of Redis, for a comparison with `expected`.

    If newer events have been added to an older stream, `event` is the newest one that is not after
    `expected.event`: that event itself, if the stream has it or had it when it was trimmed.
    """
    rows = (
        await _read_newest_event(state, expected.event) if expected.event != FIRST_EVENT_ID else []
    )
    rows = rows or await _read_newest_event(state, "+")
    trimmed = str(await state.run_command("GET", TRIMMED_KEY) or FIRST_EVENT_ID)
    event = max(rows[0][0] if rows else FIRST_EVENT_ID, trimmed, key=parse_event_id)
    token = int(await state.run_command("GET", TOKEN_KEY) or 0)
    rows = await state.run_mesh_script("job_watermarks", known=list(expected.jobs))
    jobs = {row.pop("job"): JobWatermark(**row) for row in rows["jobs"] or []}
    deleted = {row["job"]: row["at_ms"] for row in rows["deleted"] or []}
    return StateWatermark(event, token, jobs, deleted)


async def _read_newest_event(state: StateClient, end: str) -> list[list[str]]:
    rows: list[list[str]] = await state.run_command("XREVRANGE", EVENTS, end, "-", "COUNT", 1) or []
    return rows


def drop_deleted_jobs(watermark: StateWatermark, deleted: Collection[str]) -> StateWatermark:
    """Return the watermark without deleted jobs: their names may be in use again."""
    jobs = {job: one for job, one in watermark.jobs.items() if job not in deleted}
    return StateWatermark(watermark.event, watermark.token, jobs)


def compute_token_floor(*marks: StateWatermark) -> int:
    """Return a fencing token above all issued when the marks were taken or shortly after."""
    return max(mark.token for mark in marks) + TOKEN_GAP


async def raise_token_floor(state: StateClient, floor: int) -> None:
    """Make Redis issue only fencing tokens above `floor`, before any process registers.

    In an empty state the first token is also above the clock's milliseconds, as without a floor.
    """
    issued = int(await state.run_command("GET", TOKEN_KEY) or 0)
    least = floor if issued else max(floor, int(await read_server_time_ms(state)))
    if issued < least:
        await state.run_command("SET", TOKEN_KEY, least)
