"""Failures of a job's own code: the first of each kind is reported at once, then their counts.

They are reported as events `failure`: {job, kind, text, fix, where, count, calls, evaluation, by}.
`count` is the number of trajectories that failed since the last event of this kind and place.
`calls` is the number of calls that timed out since then. Those calls are repeated, so the first
event shows a hanging function before a trajectory fails.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from meshrl.common.base.errors import MeshError, ToolFailed
from meshrl.common.job.bundle.source_locations import extract_location, strip_location
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import events

REPORT_INTERVAL_S = 5.0  # between two events of one kind, except the first
MAX_KINDS = 64  # distinct kinds and places; further ones are counted by kind alone
MIN_HUNG_CALLS = 8  # in a row, of a function that has never ended
# of one that has ended: twice its ended calls, because those left at a step's end may all hang
MAX_HUNG_CALLS = 64
MIN_HUNG_DEADLINES = 4.0  # minimum total duration of these, in deadlines
CLOSE_TIMEOUT_S = 2.0  # for the last events of a job
REWARD_FUNCTION = "reward"  # name of the job's reward in messages
OTHER_KIND = "failed"  # kind of all other failures


class TrajectoryFailed(ToolFailed):
    """Error raised when a trajectory has no reward. `kind` is the failed part and the failure, as
    in `reward raised`. `detail` is a further description; `source_line` is the line of the
    author's code, if it is known.
    """

    code = "trajectory_failed"

    def __init__(
        self,
        message: str,
        *,
        kind: str = OTHER_KIND,
        detail: str = "",
        where: str = "",
        fix: str = "",
    ) -> None:
        super().__init__(message, where=where, fix=fix)
        self.kind, self.detail, self.source_line = (
            kind,
            detail or message,
            extract_location(message),
        )


@dataclass(slots=True)
class _FailureKind:
    text: str
    fix: str = ""
    count: int = 0
    calls: int = 0
    reported_at_s: float | None = None  # time of the last report


@dataclass(slots=True)
class _HungCalls:
    """Consecutive calls of one function that all timed out."""

    since_s: float
    deadline_s: float
    calls: int = 0
    text: str = ""


class FailureReporter:
    """Counter of failures on one shard. Counting never waits; `report` does."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job = mesh, job
        self._kinds: dict[tuple[str, str, bool], _FailureKind] = {}
        self._hung_calls: dict[str, _HungCalls] = {}
        self._completed_calls: Counter[str] = Counter()  # by function
        # distinguishes its events from those of another job
        self._event_prefix = mesh.random.hex_token()
        self._report_count = 0  # reported events
        self._report_lock = asyncio.Lock()

    def count_failure(self, error: ToolFailed, *, evaluation: bool = False) -> str:
        """Count a trajectory that failed by this error; return the kind of the failure."""
        kind = OTHER_KIND if type(error) is ToolFailed else error.code.replace("_", " ")
        place, text = extract_location(error.message), error.message
        if isinstance(error, TrajectoryFailed):
            kind, place, text = error.kind, error.source_line, error.detail
        found = self._get_kind(kind, strip_location(text), place, evaluation)
        found.count, found.fix = found.count + 1, error.fix
        return kind

    def count_timeout(
        self, function: str, kind: str, text: str, deadline_s: float, setting: str
    ) -> None:
        """Count a call of `function` that exceeded its deadline, the job file's `setting`, and may
        be repeated.
        """
        found = self._get_kind(kind, strip_location(text), extract_location(text), False)
        found.calls, found.fix = found.calls + 1, f"Make it finish, or raise {setting}"
        now = self._mesh.job_clock.monotonic()
        row = self._hung_calls.setdefault(function, _HungCalls(now - deadline_s, deadline_s))
        row.calls, row.text = row.calls + 1, f"{text}; {found.fix}"

    def clear_timeouts(self, function: str) -> None:
        """Clear the timeouts of a function after a completed call. A completed reward clears all,
        as it shows that trajectories end despite hanging tools in others.
        """
        if function == REWARD_FUNCTION:
            self._hung_calls.clear()
        self._hung_calls.pop(function, None)
        self._completed_calls[function] += 1

    @property
    def hopeless_reason(self) -> str:
        """Reason to stop the job: a function that has completed none of its last calls; empty:
        none.
        """
        now = self._mesh.job_clock.monotonic()
        for function, row in self._hung_calls.items():
            lasted = now - row.since_s
            least = min(max(MIN_HUNG_CALLS, 2 * self._completed_calls[function]), MAX_HUNG_CALLS)
            if row.calls >= least and lasted >= MIN_HUNG_DEADLINES * row.deadline_s:
                return (
                    f"none of the last {row.calls} calls finished within {lasted:.0f} s: {row.text}"
                )
        return ""

    async def close(self) -> None:
        """Report the remaining failures within a time limit."""
        try:
            async with self._mesh.clock.timeout(CLOSE_TIMEOUT_S, "reporting the last failures"):
                await self.report(last=True)
        except MeshError as error:
            self._mesh.telemetry.log.warning("failures could not be reported", error=str(error))

    async def report(self, last: bool = False) -> None:
        """Report new failures to the event stream; after a retryable MeshError the rest is reported
        next time.
        """
        async with self._report_lock:  # concurrent reports would count an event once
            now = self._mesh.clock.monotonic()
            for (kind, where, evaluation), found in list(self._kinds.items()):
                due = (
                    last
                    or found.reported_at_s is None
                    or now - found.reported_at_s >= REPORT_INTERVAL_S
                )
                if not due or not (found.count or found.calls):
                    continue
                count, calls = found.count, found.calls
                fields = {
                    "job": self._job,
                    "kind": kind,
                    "text": found.text,
                    "fix": found.fix,
                    "where": where,
                    "count": count,
                    "calls": calls,
                    "evaluation": evaluation,
                    "by": self._mesh.name,
                }
                mesh, op_id = self._mesh, f"failure-{self._event_prefix}-{self._report_count}"
                await events.append_fenced_event(
                    mesh.state, mesh.name, mesh.token, "failure", fields, op_id
                )
                self._report_count += 1
                found.reported_at_s = now
                found.count, found.calls = found.count - count, found.calls - calls

    def _get_kind(self, kind: str, text: str, place: str, evaluation: bool) -> _FailureKind:
        key = kind, place, evaluation
        if key not in self._kinds and len(self._kinds) >= MAX_KINDS:
            key = kind, "", evaluation
        return self._kinds.setdefault(key, _FailureKind(text))
