"""Answers to calls, and reports on processes of a sandbox that ended unexpectedly.

A reward that crashes its process with every call ends hundreds of workers a minute, so ends are
counted and published as one event every few seconds. They fail no job by themselves, because each
of their calls is answered by type.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.mesh.process.supervision.exit_reports import ExitReport, ExitReportSender
from meshrl.common.state.redis.client import StateClient

REPORT_INTERVAL_S = 5.0  # between two events of one name
KILLED_EXIT_CODE = -9  # why a process was killed that did not answer


@dataclass(frozen=True)
class CallResult:
    status: str  # a status of meshrl.common.api.sandbox
    value: Any
    error: str


@dataclass
class _ExitCounter:
    exit_count: int
    code: int
    why: str  # of the last one
    log: str
    job: str


class ExitReporter:
    """Reporter of exits that publishes nothing: for a sandbox without a mesh."""

    def record_exit(self, name: str, code: int, why: str, log: Path | None, job: str = "") -> None:
        """Record that a process has ended, or was killed, and that another replaces it."""

    def stop(self) -> None:
        """Drop pending reports."""


class RedisExitReporter(ExitReporter):
    """Reporter that writes to Redis for a sandbox of one job, to which its zygotes' ends count."""

    def __init__(self, state: StateClient, clock: Clock, sandbox: str, job: str) -> None:
        self._reports, self._clock, self._sandbox, self._job = (
            ExitReportSender(state, clock),
            clock,
            sandbox,
            job,
        )
        self._pending: dict[str, _ExitCounter] = {}
        self._report_task: asyncio.Task[None] | None = None

    def record_exit(self, name: str, code: int, why: str, log: Path | None, job: str = "") -> None:
        counter = self._pending.setdefault(name, _ExitCounter(0, code, why, "", job or self._job))
        counter.exit_count, counter.code, counter.why = counter.exit_count + 1, code, why
        counter.log = str(log) if log is not None else ""
        if self._report_task is None:
            self._report_task = asyncio.get_running_loop().create_task(
                self._report_pending(), name="report exits"
            )

    async def _report_pending(self) -> None:
        """Report the first exit at once, and those of the next seconds together."""
        try:
            while self._pending:
                exits, self._pending = self._pending, {}
                for name, end in exits.items():
                    await self._reports.report(
                        ExitReport(f"{name} of {self._sandbox}", charge_job=False, **vars(end))
                    )
                await self._clock.sleep(REPORT_INTERVAL_S)
        finally:
            self._report_task = None

    def stop(self) -> None:
        self._reports.stop()
        if self._report_task is not None:
            self._report_task.cancel()
