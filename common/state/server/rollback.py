"""Whether a Redis is older than what lies outside it tells: restored from a copy, cut short, or on
a disk that lied.

How far a state has come is a `RollbackMark`. What Redis holds is compared with what the launcher
noted, the recorder wrote down, and checkpoints and ledgers mention: an older Redis would number
versions, groups and fencing tokens a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from meshrl.common.state.events import order
from meshrl.common.state.redis.client import State, server_ms
from meshrl.common.state.redis.keys import EVENTS, MESH, TRIMMED

TOKEN = f"{MESH}:token"
# More tokens than are issued between two notes of the launcher, a second apart; few enough that the
# counter, which begins at the milliseconds of the clock, stays within the 14 digits of Lua.
TOKENS_APART = 10_000
FIRST = "0-0"


@dataclass(frozen=True)
class JobMark:
    """How far a job has come: its newest version is `version` of `lineage`; `next_group` and all
    above are free.
    """

    lineage: int = -1
    version: int = -1
    next_group: int = 0
    run_dir: str = ""
    phase: str = ""

    @property
    def begun(self) -> bool:
        """Whether it has had a version or a group."""
        return self.version >= 0 or self.next_group > 0


@dataclass(frozen=True)
class RollbackMark:
    """How far the state of a mesh has come; of what lies outside Redis, at least so far."""

    event: str = FIRST  # id of the newest event
    token: int = 0  # the highest fencing token that was issued
    jobs: Mapping[str, JobMark] = field(default_factory=dict)
    deleted: Mapping[str, int] = field(default_factory=dict)  # jobs that are known, and when, in ms

    @property
    def empty(self) -> bool:
        """Whether nothing has happened."""
        return self.event == FIRST and not self.token and not self.jobs


def joined(marks: list[RollbackMark]) -> RollbackMark:
    """As far as any of them has come."""
    jobs: dict[str, JobMark] = {}
    for mark in marks:
        for job, one in mark.jobs.items():
            was = jobs.get(job, JobMark())
            version = max((was.lineage, was.version), (one.lineage, one.version))
            next_group = max(was.next_group, one.next_group)
            about = one.run_dir or was.run_dir, one.phase or was.phase
            jobs[job] = JobMark(*version, next_group, *about)
    event = max((mark.event for mark in marks), key=order, default=FIRST)
    return RollbackMark(event, max((mark.token for mark in marks), default=0), jobs)


def older(held: RollbackMark, known: RollbackMark, gone: Collection[str] = ()) -> str:
    """Why what Redis holds is older than what is known; empty when it is not. Jobs that are `gone`
    need not be there: an earlier Redis was lost with them, and they were not put back.

    A lineage may begin below the versions of the one before it, so versions count within one.
    """
    if held.empty and not known.empty:
        return "it is empty"
    for job, one in known.jobs.items():
        here = held.jobs.get(job)
        if here is None:
            if one.version >= 0 and job not in gone and job not in held.deleted:
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
    if order(held.event) < order(known.event):
        return f"its newest event of those that were seen is {held.event}, not {known.event}"
    if held.token < known.token:
        return f"its fencing tokens end at {held.token}, and {known.token} has been issued"
    return ""


async def held(state: State, known: RollbackMark) -> RollbackMark:
    """What Redis holds, to be compared with `known`.

    Where newer events have been added to an older stream, `event` is the newest that is not after
    the one that is known: that one itself, if the stream has it or had it when it was trimmed.
    """
    rows = await _newest(state, known.event) if known.event != FIRST else []
    rows = rows or await _newest(state, "+")
    trimmed = str(await state.command("GET", TRIMMED) or FIRST)
    event = max(rows[0][0] if rows else FIRST, trimmed, key=order)
    token = int(await state.command("GET", TOKEN) or 0)
    rows = await state.run_mesh("job_marks", known=list(known.jobs))
    jobs = {row.pop("job"): JobMark(**row) for row in rows["jobs"] or []}
    deleted = {row["job"]: row["at_ms"] for row in rows["deleted"] or []}
    return RollbackMark(event, token, jobs, deleted)


async def _newest(state: State, end: str) -> list[list[str]]:
    rows: list[list[str]] = await state.command("XREVRANGE", EVENTS, end, "-", "COUNT", 1) or []
    return rows


def without(known: RollbackMark, deleted: Collection[str]) -> RollbackMark:
    """What is known but for jobs that were deleted: another may have the name of one of them."""
    jobs = {job: one for job, one in known.jobs.items() if job not in deleted}
    return RollbackMark(known.event, known.token, jobs)


def floor_above(*marks: RollbackMark) -> int:
    """A fencing token above every one that was issued when or shortly after these were taken."""
    return max(mark.token for mark in marks) + TOKENS_APART


async def raise_tokens(state: State, floor: int) -> None:
    """Every token that is issued from now on is above `floor`; the first in an empty state above
    the milliseconds of the clock too, as without a floor. Before anybody registers.
    """
    issued = int(await state.command("GET", TOKEN) or 0)
    least = floor if issued else max(floor, int(await server_ms(state)))
    if issued < least:
        await state.command("SET", TOKEN, least)
