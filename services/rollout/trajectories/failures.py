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
from meshrl.common.job.bundle.authored import place_in, without_place
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import events

TELL_S = 5.0  # between two events of one kind, the first apart
PLACES = 64  # kinds and places that are told apart; further ones count for their kind alone
HUNG_CALLS = 8  # in a row: a function that ends sometimes has ended by then
HUNG_DEADLINES = 4.0  # that these must have lasted, in all
CLOSE_S = 2.0  # for the last events of a job
REWARD = "reward"  # what the job's reward is called in what is said of it
OTHER = "failed"  # the kind of what has no other


class TrajectoryFailed(ToolFailed):
    """A trajectory has no reward. `kind` is what failed and how, as in `reward raised`; `detail`
    what is to be said beside it; `place` the line of the author's code, where it is known.
    """

    code = "trajectory_failed"

    def __init__(
        self, message: str, *, kind: str = OTHER, detail: str = "", where: str = "", fix: str = ""
    ) -> None:
        super().__init__(message, where=where, fix=fix)
        self.kind, self.detail, self.place = kind, detail or message, place_in(message)


@dataclass(slots=True)
class _FailureKind:
    text: str
    fix: str = ""
    count: int = 0
    calls: int = 0
    told: float | None = None  # when it was last


@dataclass(slots=True)
class _Row:
    """Calls of one function in a row that were all given up."""

    since: float
    deadline_s: float
    calls: int = 0
    text: str = ""


class Failures:
    """Counts what fails on one shard. Counting never waits; `tell` does."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job = mesh, job
        self._kinds: dict[tuple[str, str, bool], _FailureKind] = {}
        self._hanging: dict[str, _Row] = {}
        self._of = mesh.random.token()  # of its events, which another job's are no repeats of
        self._told = 0  # events
        self._telling = asyncio.Lock()

    def failed(self, error: ToolFailed, *, evaluation: bool = False) -> str:
        """A trajectory has failed by this error; its kind."""
        kind = OTHER if type(error) is ToolFailed else error.code.replace("_", " ")
        place, text = place_in(error.message), error.message
        if isinstance(error, TrajectoryFailed):
            kind, place, text = error.kind, error.place, error.detail
        found = self._kind(kind, without_place(text), place, evaluation)
        found.count, found.fix = found.count + 1, error.fix
        return kind

    def gave_up(self, what: str, kind: str, text: str, deadline_s: float, key: str) -> None:
        """A call of the function `what` took more than its deadline, the job file's `key`, and may
        be made again.
        """
        found = self._kind(kind, without_place(text), place_in(text), False)
        found.calls, found.fix = found.calls + 1, f"make it finish, or raise {key}"
        now = self._mesh.job_clock.monotonic()
        row = self._hanging.setdefault(what, _Row(now - deadline_s, deadline_s))
        row.calls, row.text = row.calls + 1, f"{text}; {found.fix}"

    def answered(self, what: str) -> None:
        """A call of the function has ended by itself. A reward that has says that trajectories come
        to their end, whatever tool hangs in others.
        """
        if what == REWARD:
            self._hanging.clear()
        self._hanging.pop(what, None)

    @property
    def hopeless(self) -> str:
        """Why the job need not go on: a function that has ended none of its last calls."""
        now = self._mesh.job_clock.monotonic()
        for row in self._hanging.values():
            lasted = now - row.since
            if row.calls >= HUNG_CALLS and lasted >= HUNG_DEADLINES * row.deadline_s:
                return f"none of the last {row.calls} calls ended, in {lasted:.0f} s: {row.text}"
        return ""

    async def close(self) -> None:
        """Tells what is left, if that does not take long."""
        try:
            async with self._mesh.clock.timeout(CLOSE_S, "the last failures"):
                await self.tell(last=True)
        except MeshError as error:
            self._mesh.telemetry.log.warning("failures not told", error=str(error))

    async def tell(self, last: bool = False) -> None:
        """Puts into the event stream what it does not know yet; a retryable MeshError leaves the
        rest for the next time.
        """
        async with self._telling:  # an event told twice at a time would count once
            now = self._mesh.clock.monotonic()
            for (kind, where, evaluation), found in list(self._kinds.items()):
                due = last or found.told is None or now - found.told >= TELL_S
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
                mesh, op_id = self._mesh, f"failure-{self._of}-{self._told}"
                await events.append_as(mesh.state, mesh.name, mesh.token, "failure", fields, op_id)
                self._told += 1
                found.told = now
                found.count, found.calls = found.count - count, found.calls - calls

    def _kind(self, kind: str, text: str, place: str, evaluation: bool) -> _FailureKind:
        key = kind, place, evaluation
        if key not in self._kinds and len(self._kinds) >= PLACES:
            key = kind, "", evaluation
        return self._kinds.setdefault(key, _FailureKind(text))
