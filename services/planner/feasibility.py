"""The feasibility of a job on this mesh. A job that cannot run is waited with, and then fails:
workers join late, and lost ones come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.state.gangs import Gang
from services.planner.job import PlannedJob
from services.planner.placement import shortage

SHORT_S = 15.0  # a mesh too small for so long is not one whose workers are still joining


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A mesh too small for a job."""

    job: str
    since_s: float
    why: str  # what is missing, and what to do


def shortfall(
    gangs: Sequence[Gang], job: PlannedJob, before: Shortfall | None, now_s: float
) -> Shortfall | None:
    """What these gangs lack for the job; None when it can run. `before` is the shortfall at the
    last look.
    """
    why = shortage(gangs, job.ranks, job.samples, job.scoring)
    if not why:
        return None
    lasts = before is not None and before.job == job.id
    return Shortfall(job.id, before.since_s if before is not None and lasts else now_s, why)


def hopeless(short: Shortfall, now_s: float) -> bool:
    """Whether the shortfall has lasted so long that the job fails."""
    return now_s - short.since_s > SHORT_S
