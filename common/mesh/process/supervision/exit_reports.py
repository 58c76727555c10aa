"""Unexpected exits of processes: published as events, counted by name, and charged to their
jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.mesh.process.diagnosis.failure import Failure, format_failure, read_log_end
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX, job_prefix

EXITS_KEY = f"{MESH_PREFIX}:exits"
REPORT_TIMEOUT_S = 2.0  # seconds; a report must not delay a restart
RETRY_LIMIT_S = 60.0  # seconds of retries while Redis is unavailable
RETRY_S = 1.0
NO_FAILURE = Failure("", "")
CRASH = "crash"  # restart class of an exit without an error: a signal, or no report
CRASH_SIGNALS = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS,
    signal.SIGTRAP,
}  # fmt: skip


@dataclass(frozen=True)
class LastExit:
    """Last exit of a process with this name."""

    name: str
    job: str
    code: int
    why: str
    at_ms: int
    times: int  # unexpected exits of processes with this name
    final: bool  # it was not restarted
    error: dict[str, str] = field(default_factory=dict)  # type, text, where, fix; empty: none
    log: str = ""

    @property
    def description(self) -> str:
        """Error of the process, or else the reason of its exit."""
        return format_failure(self.error) or self.why


@dataclass(frozen=True)
class ExitReport:
    """Report of a parent about a child that has exited."""

    name: str
    code: int
    why: str
    failure: Failure | None = None
    job: str = ""  # the only job that the process works for
    final: bool = False  # it is not restarted
    is_budget_exhausted: bool = False  # its job fails, if it may be the cause
    log: str = ""
    emit_event: bool = True  # False: the event is published, and this report is its outcome
    charge_job: bool = True  # False: it never fails its job, which bounds its exits otherwise
    run_time_s: float = 0.0  # run time: a process that was ready can succeed
    exit_count: int = 1  # such exits of this name since the last report
    operation_id: str = field(default_factory=lambda: uuid.uuid4().hex)


async def report_exit(state: StateClient, report: ExitReport) -> bool:
    """Record an exit once per report; return True if its job failed by it."""
    failure = report.failure or NO_FAILURE
    restart = failure.restart if report.failure is not None else CRASH
    job = report.job or failure.job
    cause = report.failure or format_exit(report.code, report.why)
    args = asdict(replace(report, failure=None)) | {
        "op": report.operation_id,
        "job": job,
        "restart": restart,
        "error": failure.to_event_fields(),
        "message": f"{report.name} exited: {cause}",
        "advice": compose_advice(report, restart),
    }
    # The exit of a job's own code fails no job: its reporter may not read jobs.
    script = "charge_exit" if report.charge_job or restart != CRASH else "record_exit"
    answer = await state.run_script(script, [job_prefix(job) if job else MESH_PREFIX], args)
    return bool(answer["failed"])


def compose_advice(report: ExitReport, restart: str) -> str:
    """Compose the part of a job's error after the cause: a remedy, and the last lines of the
    log.
    """
    text = ""
    if restart == CRASH:
        text = f". {advise_on_status(report.code)}"
    elif restart != "never" and not (report.failure and report.failure.fix):
        text = (
            f". Run `meshrl logs {report.name}` to see the cause, then `meshrl resume` to continue"
        )
    if report.log:
        text += f". Its log: {report.log}"
        if restart != "never" and (log_end := read_log_end(Path(report.log))):
            text += f" ends: {log_end}"
    return text


def format_exit(code: int, why: str) -> str:
    """Format the reason of an exit, with the name of its signal: `signal 11 (SIGSEGV)`."""
    if code >= 0 or why != f"signal {-code}":
        return why
    try:
        return f"{why} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal
        return why


def advise_on_status(code: int) -> str:
    """Return advice for an exit of which only the status `code` is known."""
    if -code in CRASH_SIGNALS:
        return (
            "Native code has crashed (a kernel, a driver or a library). Read its log; try "
            "another `rollout.engine` or `mesh.device` to find the component"
        )
    if code == -signal.SIGKILL:
        return "A process or the kernel's out-of-memory killer killed it: run `dmesg` to find out"
    if code < 0:
        return "A process on this host sent it that signal"
    return "It reported no cause: read its log"


async def read_last_exits(state: StateClient) -> list[LastExit]:
    """Return the last unexpected exit of every process, the latest first."""
    row = (await state.run_mesh_script("read_row", key=EXITS_KEY))["row"] or {}
    known = LastExit.__dataclass_fields__
    rows = map(json.loads, row.values())
    found = [LastExit(**{name: one[name] for name in known if name in one}) for one in rows]
    return sorted(found, key=lambda end: (-end.at_ms, end.name))


async def clear_last_exits(state: StateClient) -> None:
    """Delete the exits of an earlier run of the mesh."""
    await state.run_command("DEL", EXITS_KEY)


class ExitReportSender:
    """Sender of exit reports: at once, or in the background for a while if Redis does not
    answer.
    """

    def __init__(self, state: StateClient, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._background: set[asyncio.Task[None]] = set()

    async def report(self, report: ExitReport) -> bool:
        """Report an exit within REPORT_TIMEOUT_S; return True if the job is known to have failed by
        it.
        """
        try:
            return await self._report_once(report)
        except (StateUnavailable, DeadlineExceeded):
            self.report_in_background(report)
            return False

    def report_in_background(self, report: ExitReport) -> None:
        """Report an exit in the background, such as that of Redis itself."""
        task = asyncio.get_running_loop().create_task(
            self._report_until_accepted(report), name="late report"
        )
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _report_once(self, report: ExitReport) -> bool:
        async with self._clock.timeout(REPORT_TIMEOUT_S, "the report of an exit"):
            return await report_exit(self._state, report)

    async def _report_until_accepted(self, report: ExitReport) -> None:
        until = self._clock.monotonic() + RETRY_LIMIT_S
        while self._clock.monotonic() < until:
            await self._clock.sleep(RETRY_S)
            with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                await self._report_once(report)
                return

    def stop(self) -> None:
        """Drop reports that could not be sent."""
        for task in self._background:
            task.cancel()


def to_document(end: LastExit) -> dict[str, Any]:
    """Convert an exit to a JSON document."""
    return asdict(end) | {"told": end.description}
