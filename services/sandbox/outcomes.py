"""The answer to one call; and processes of a sandbox that ended unasked, its workers and zygotes:
counted, and told together.

A reward that crashes its process with every call ends hundreds a minute: they are told as one event
each few seconds. They fail no job by themselves, because each call of theirs is answered by type.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.mesh.process.supervision.ended import EndReport, Reports
from meshrl.common.state.redis.client import State

TELL_S = 5.0  # between two events of one name
KILLED = -9  # what ended a process that was killed for what it did not do


@dataclass(frozen=True)
class Answer:
    status: str  # a status of meshrl.common.api.sandbox
    value: Any
    error: str


@dataclass
class _SeenEnds:
    count: int
    code: int
    why: str  # of the last one
    log: str
    job: str


class Ends:
    """Hears of ends. This one tells nobody: for a sandbox without a mesh."""

    def saw(self, name: str, code: int, why: str, log: Path | None, job: str = "") -> None:
        """A process of this name has ended, or was killed, and another takes its place."""

    def stop(self) -> None:
        """Drops what is not told yet."""


class ToldEnds(Ends):
    """Tells Redis, in the name of the sandbox `of`, which serves one job: its zygotes' ends are
    that job's too.
    """

    def __init__(self, state: State, clock: Clock, of: str, job: str) -> None:
        self._reports, self._clock, self._of, self._job = Reports(state, clock), clock, of, job
        self._seen: dict[str, _SeenEnds] = {}
        self._telling: asyncio.Task[None] | None = None

    def saw(self, name: str, code: int, why: str, log: Path | None, job: str = "") -> None:
        seen = self._seen.setdefault(name, _SeenEnds(0, code, why, "", job or self._job))
        seen.count, seen.code, seen.why = seen.count + 1, code, why
        seen.log = str(log) if log is not None else ""
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell(), name="tell ends")

    async def _tell(self) -> None:
        """The first at once, those of the next seconds together."""
        try:
            while self._seen:
                seen, self._seen = self._seen, {}
                for name, end in seen.items():
                    await self._reports.tell(
                        EndReport(f"{name} of {self._of}", charged=False, **vars(end))
                    )
                await self._clock.sleep(TELL_S)
        finally:
            self._telling = None

    def stop(self) -> None:
        self._reports.stop()
        if self._telling is not None:
            self._telling.cancel()
