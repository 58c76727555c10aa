"""Policy for a service that has exhausted its restarts: a fresh budget, or the end of its mesh.

An operation that cannot succeed must end: so a fresh budget takes a temporary reason.
"""

from __future__ import annotations

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.mesh.process.supervision.exit_reports import ExitReport, ExitReportSender
from meshrl.common.mesh.process.supervision.supervisor import ChildExit, ChildSpec
from meshrl.common.state import jobs
from meshrl.common.state.redis.client import StateClient, read_server_time_ms

# Without a group, step or evaluation of any job: another process or a lease is back sooner, as a
# service is restarted within seconds and reads its state within minutes.
RECOVERY_TIMEOUT_S = 600.0
PROGRESS_WINDOW_S = 120.0  # a mesh whose jobs come further in spite of it is not given up


async def should_reset_budget(
    state: StateClient,
    reports: ExitReportSender,
    spec: ChildSpec,
    child_exit: ChildExit,
    disk_full_reason: str,
) -> bool:
    """Return True if a service with an exhausted budget gets a fresh one.

    A visible outage is waited out: a full disk (`disk_full_reason`) or an absent Redis. Jobs that
    make progress need the mesh. A lost peer or lease gets a limited time to return. A failure
    caused by one job ends that job, and the mesh continues with the others.
    """
    failure = child_exit.failure
    if disk_full_reason or (failure is not None and failure.restart == "always"):
        return True
    try:
        last_ms = max((row.progress_ms for row in await jobs.read_jobs(state)), default=0)
        quiet_s = (await read_server_time_ms(state) - last_ms) / 1000  # since any job came further
    except (StateUnavailable, DeadlineExceeded):
        return True
    if failure is not None and failure.restart == "patient":
        if min(quiet_s, child_exit.repeating_for_s) < RECOVERY_TIMEOUT_S:
            return True
    elif quiet_s < PROGRESS_WINDOW_S:
        return True
    if failure is None or not failure.job:
        return False
    log = str(spec.log) if spec.log is not None else ""
    return await reports.report(
        ExitReport(
            spec.name,
            child_exit.code,
            child_exit.why,
            failure,
            is_budget_exhausted=True,
            log=log,
            emit_event=False,
        )
    )
