"""The rows that a mesh's own figures are made of, at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.state import ended, jobs, leader, steps
from common.state.client import State, server_ms
from common.state.ended import Ended
from common.state.jobs import JobRow
from common.state.keys import PLANNER
from meshrl.directory.places import MeshPlace
from meshrl.view.mesh import hosts as standing
from meshrl.view.mesh.diagnosing import stalls
from meshrl.view.mesh.pool import Pool, pool
from meshrl.view.mesh.stalled import Stall


@dataclass(frozen=True)
class MeshLook:
    """One look. Times are Redis' own, in milliseconds."""

    now_ms: float
    jobs: Sequence[JobRow] = ()
    newest: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # job -> its last step's row
    pool: Pool = field(default_factory=Pool)
    hosts: Mapping[str, str] = field(default_factory=dict)  # host -> its state
    leader: str = ""  # who leads the planners; empty: nobody
    ended: Sequence[Ended] = ()
    stalls: Sequence[Stall] = ()


async def look(state: State, place: MeshPlace) -> MeshLook:
    """All of it, of the head at `place`. StateUnavailable also when Redis takes no writes."""
    stalled, _ = await stalls(state)
    rows = await jobs.jobs(state)
    newest = {}
    for row in rows:
        if row.steps_done and not row.ended:
            newest[row.id] = await steps.step_rows(state, row.id, since=row.steps_done - 1)
    leading, _ = await leader.leader(state, PLANNER)
    return MeshLook(
        now_ms=await server_ms(state),
        jobs=rows,
        newest={job: found[-1] for job, found in newest.items() if found},
        pool=await pool(state),
        hosts={host.host: host.state for host in await standing.rows(state, place)},
        leader=leading,
        ended=await ended.ended(state),
        stalls=stalled,
    )
