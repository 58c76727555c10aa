"""What fails in a job's own code: the first of each kind is told at once, then how often.

Told as events `failure`: {job, kind, text, fix, where, count, calls, evaluation, by}. `count` are
the trajectories that failed so since the last event of this kind and place, `calls` the calls that
had to be given up meanwhile: they are made again, so that the first shows what hangs before a
trajectory fails.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from meshrl.common.base.errors import MeshError, ToolFailed
from meshrl.common.job.bundle.source_locations import extract_location, strip_location
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import events

REPORT_INTERVAL_S = 5.0  # between two events of one kind, the first apart
MAX_KINDS = 64  # kinds and places that are told apart; further ones count for their kind alone
MIN_HUNG_CALLS = 8  # in a row: a function that ends sometimes has ended by then
MIN_HUNG_DEADLINES = 4.0  # that these must have lasted, in all
CLOSE_TIMEOUT_S = 2.0  # for the last events of a job
REWARD_FUNCTION = "reward"  # what the job's reward is called in what is said of it
OTHER_KIND = "failed"  # the kind of what has no other


class TrajectoryFailed(ToolFailed):
    """A trajectory has no reward. `kind` is what failed and how, as in `reward raised`; `detail`
    what is to be said beside it; `place` the line of the author's code, where it is known.
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
    reported_at_s: float | None = None  # when it was last


@dataclass(slots=True)
class _HungCalls:
    """Calls of one function in a row that were all given up."""

    since_s: float
    deadline_s: float
    calls: int = 0
    text: str = ""


class FailureReporter:
    """Counts what fails on one shard. Counting never waits; `tell` does."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job = mesh, job
        self._kinds: dict[tuple[str, str, bool], _FailureKind] = {}
        self._hung_calls: dict[str, _HungCalls] = {}
        self._event_prefix = (
            mesh.random.hex_token()
        )  # of its events, which another job's are no repeats of
        self._report_count = 0  # events
        self._report_lock = asyncio.Lock()

    def count_failure(self, error: ToolFailed, *, evaluation: bool = False) -> str:
        """A trajectory has failed by this error; its kind."""
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
        """A call of the function `what` took more than its deadline, the job file's `key`, and may
        be made again.
        """
        found = self._get_kind(kind, strip_location(text), extract_location(text), False)
        found.calls, found.fix = found.calls + 1, f"make it finish, or raise {setting}"
        now = self._mesh.job_clock.monotonic()
        row = self._hung_calls.setdefault(function, _HungCalls(now - deadline_s, deadline_s))
        row.calls, row.text = row.calls + 1, f"{text}; {found.fix}"

    def clear_timeouts(self, function: str) -> None:
        """A call of the function has ended by itself. A reward that has says that trajectories come
        to their end, whatever tool hangs in others.
        """
        if function == REWARD_FUNCTION:
            self._hung_calls.clear()
        self._hung_calls.pop(function, None)

    @property
    def hopeless_reason(self) -> str:
        """Why the job need not go on: a function that has ended none of its last calls."""
        now = self._mesh.job_clock.monotonic()
        for row in self._hung_calls.values():
            lasted = now - row.since_s
            if row.calls >= MIN_HUNG_CALLS and lasted >= MIN_HUNG_DEADLINES * row.deadline_s:
                return f"none of the last {row.calls} calls ended, in {lasted:.0f} s: {row.text}"
        return ""

    async def close(self) -> None:
        """Tells what is left, if that does not take long."""
        try:
            async with self._mesh.clock.timeout(CLOSE_TIMEOUT_S, "the last failures"):
                await self.report(last=True)
        except MeshError as error:
            self._mesh.telemetry.log.warning("failures not told", error=str(error))

    async def report(self, last: bool = False) -> None:
        """Puts into the event stream what it does not know yet; a retryable MeshError leaves the
        rest for the next time.
        """
        async with self._report_lock:  # an event told twice at a time would count once
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
