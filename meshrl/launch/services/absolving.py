"""Whether a service whose restarts are spent is given a fresh budget, or is given up with its mesh.

What cannot succeed must end: so a fresh budget takes a reason that holds for this time only.
"""

from __future__ import annotations

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.mesh.process.supervision.ended import EndReport, Reports
from meshrl.common.mesh.process.supervision.supervisor import ChildEnd, ChildSpec
from meshrl.common.state import jobs
from meshrl.common.state.redis.client import State, server_ms

# Without a group, step or evaluation of any job: another process or a lease is back sooner, as a
# service is restarted within seconds and reads its state within minutes.
PATIENCE_S = 600.0
PROGRESS_S = 120.0  # a mesh whose jobs come further in spite of it is not given up


async def absolved(
    state: State, reports: Reports, spec: ChildSpec, end: ChildEnd, full: str
) -> bool:
    """An outage that people are shown (`full`: which disk is; or Redis is away) is waited out. Jobs
    that make progress need the mesh. A lost peer or lease is waited for, for PATIENCE_S. What one
    job has brought about ends that job, and the mesh goes on with the others.
    """
    failure = end.failure
    if full or (failure is not None and failure.restart == "always"):
        return True
    try:
        last_ms = max((row.progress_ms for row in await jobs.jobs(state)), default=0)
        quiet_s = (await server_ms(state) - last_ms) / 1000  # since any job came further
    except (StateUnavailable, DeadlineExceeded):
        return True
    if failure is not None and failure.restart == "patient":
        if min(quiet_s, end.lasting_s) < PATIENCE_S:
            return True
    elif quiet_s < PROGRESS_S:
        return True
    if failure is None or not failure.job:
        return False
    log = str(spec.log) if spec.log is not None else ""
    return await reports.tell(
        EndReport(spec.name, end.code, end.why, failure, spent=True, log=log, event=False)
    )
