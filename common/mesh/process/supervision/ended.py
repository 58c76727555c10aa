"""Processes that ended unasked: told as events, counted by name, and charged to their jobs."""

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
from meshrl.common.mesh.process.ends.failure import Failure, end_of, told
from meshrl.common.state.redis.client import State
from meshrl.common.state.redis.keys import MESH, job_prefix

ENDED = f"{MESH}:ended"
EVENT_S = 2.0  # a report must not hold up a restart
PATIENCE_S = 60.0  # while Redis is away it is tried again for so long
RETRY_S = 1.0
NO_ERROR = Failure("", "")
CRASH = "crash"  # what `restart` is of an end without an error: a signal, or no word
CRASHES = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS,
    signal.SIGTRAP,
}  # fmt: skip


@dataclass(frozen=True)
class LastEnd:
    """The last end of a process of this name."""

    name: str
    job: str
    code: int
    why: str
    at_ms: int
    times: int  # that processes of this name have ended unasked
    final: bool  # it was not started again
    error: dict[str, str] = field(default_factory=dict)  # type, text, where, fix; empty: none
    log: str = ""

    @property
    def told(self) -> str:
        """The error, or else how it ended."""
        return told(self.error) or self.why


@dataclass(frozen=True)
class EndReport:
    """What a parent tells of a child that has ended."""

    name: str
    code: int
    why: str
    failure: Failure | None = None
    job: str = ""  # that the process works for alone
    final: bool = False  # it is not started again
    spent: bool = False  # its restarts are spent: its job fails, if it may be the job's fault
    log: str = ""
    event: bool = True  # False: the event was told before, and this is what became of it
    charged: bool = True  # False: it never fails its job, which has another bound for it
    ran_s: float = 0.0  # how long it ran: what had come up can succeed
    count: int = 1  # processes of this name that have ended so since the last report
    operation: str = field(default_factory=lambda: uuid.uuid4().hex)


async def tell(state: State, report: EndReport) -> bool:
    """Records an end, once for a report; whether its job failed by it."""
    failure = report.failure or NO_ERROR
    restart = failure.restart if report.failure is not None else CRASH
    job = report.job or failure.job
    args = asdict(replace(report, failure=None)) | {
        "op": report.operation,
        "job": job,
        "restart": restart,
        "error": failure.fields(),
        "told": f"{report.name} ended by {report.failure or named(report.code, report.why)}",
        "advice": advice(report, restart),
    }
    # The end of what a job's author has written fails no job: who tells of it may read none.
    script = "process_ended" if report.charged or restart != CRASH else "end_seen"
    answer = await state.run(script, [job_prefix(job) if job else MESH], args)
    return bool(answer["failed"])


def advice(report: EndReport, restart: str) -> str:
    """What a job's error says after the cause: what to do, and what the log has of it."""
    text = ""
    if restart == CRASH:
        text = f". {what_to_do(report.code)}"
    elif restart != "never" and not (report.failure and report.failure.fix):
        text = f". `meshrl logs {report.name}` shows what led to it, `meshrl resume` goes on"
    if report.log:
        text += f". Its log: {report.log}"
        if restart != "never" and (said := end_of(Path(report.log))):
            text += f" ends: {said}"
    return text


def named(code: int, why: str) -> str:
    """How a process ended, with the name of its signal: `signal 11 (SIGSEGV)`."""
    if code >= 0 or why != f"signal {-code}":
        return why
    try:
        return f"{why} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal
        return why


def what_to_do(code: int) -> str:
    """Where to look when nothing but the exit status `code` is known."""
    if -code in CRASHES:
        return (
            "Native code has crashed (a kernel, a driver, a library): its log has what it said "
            "last; another `rollout.engine` or `mesh.device` tells whose it is"
        )
    if code == -signal.SIGKILL:
        return "Somebody kills it, or the kernel for want of memory: `dmesg` says which"
    if code < 0:
        return "Somebody or something on this host sends it that signal"
    return "It said no more: its log has what led to it"


async def ended(state: State) -> list[LastEnd]:
    """The last end of every process that has ended unasked, the latest first."""
    row = (await state.run_mesh("row", key=ENDED))["row"] or {}
    known = LastEnd.__dataclass_fields__
    rows = map(json.loads, row.values())
    found = [LastEnd(**{name: one[name] for name in known if name in one}) for one in rows]
    return sorted(found, key=lambda end: (-end.at_ms, end.name))


async def forget_all(state: State) -> None:
    """A mesh that starts again knows nothing of how its processes ended before."""
    await state.command("DEL", ENDED)


class Reports:
    """Tells of ends at once, or from the background for a while where Redis does not answer."""

    def __init__(self, state: State, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._late: set[asyncio.Task[None]] = set()

    async def tell(self, report: EndReport) -> bool:
        """Whether the job is known to have failed by it; it takes EVENT_S at most."""
        try:
            return await self._once(report)
        except (StateUnavailable, DeadlineExceeded):
            self.soon(report)
            return False

    def soon(self, report: EndReport) -> None:
        """Tells of an end from the background, as of that of Redis itself."""
        task = asyncio.get_running_loop().create_task(self._later(report), name="late report")
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _once(self, report: EndReport) -> bool:
        async with self._clock.timeout(EVENT_S, "the report of an end"):
            return await tell(self._state, report)

    async def _later(self, report: EndReport) -> None:
        until = self._clock.monotonic() + PATIENCE_S
        while self._clock.monotonic() < until:
            await self._clock.sleep(RETRY_S)
            with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                await self._once(report)
                return

    def stop(self) -> None:
        """Drops what could not be told."""
        for task in self._late:
            task.cancel()


def document(end: LastEnd) -> dict[str, Any]:
    """An end as JSON has it."""
    return asdict(end) | {"told": end.told}
