"""Sessions: interpreters in jails that retain their state between the calls of a trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from meshrl.common.api.sandbox import CRASHED, EVICTED, OK, OUT_OF_MEMORY, REFUSED
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import BadMessage, DeadlineExceeded, PeerLost
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import (
    GRACE_S,
    MAX_SLOWDOWN,
    Jail,
    ProgramResult,
    describe_denial,
)
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.jail.guests import guest

MAX_REMEMBERED = 4096  # evicted sessions whose next call reports it
SEND_S = 30.0
WROTE_TO_CHANNEL = "its code wrote to the interpreter's channel"
CLOSED_CHANNEL = "its code closed the interpreter's channel"
SESSION_LOST = "the session has ended and its state is lost; the next call starts a new one"


class _ChannelCorrupted(Exception):
    """Error raised for data other than the interpreter's answer; its text is reported."""


@dataclass
class _CellSession:
    """Session that occupies a place, from before its jail starts until it is ended."""

    last_used_s: float
    jail: Jail | None = None  # none yet
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    pending_calls: int = 0  # calls that run or wait for the lock
    cell_count: int = 0
    is_closed: bool = False

    def close(self) -> None:
        """Close its jail, or make the call that starts one close it."""
        self.is_closed = True
        if self.jail is not None:
            self.jail.close()


class Sessions:
    """Sessions of one job: at most `max_sessions`, each ended after `idle_timeout_s` idle."""

    def __init__(
        self,
        launcher: JailLauncher,
        clock: Clock,
        limits: JailLimits,
        max_sessions: int,
        idle_timeout_s: float,
        job_clock: Clock | None = None,
    ) -> None:
        """Create an empty table; `job_clock`: measures idle time; it may stand still."""
        self._launcher, self._clock, self._limits = launcher, clock, limits
        self._max_sessions, self._idle_timeout_s, self._idle_clock = (
            max_sessions,
            idle_timeout_s,
            job_clock or clock,
        )
        self._open: OrderedDict[str, _CellSession] = OrderedDict()  # in the order of their last use
        self._evicted: OrderedDict[str, str] = OrderedDict()  # name -> why
        # sessions whose end has been reported
        self._reported_lost: OrderedDict[str, None] = OrderedDict()

    @property
    def size(self) -> int:
        return len(self._open)

    async def run(self, name: str, source: str, has_session_state: bool = False) -> ProgramResult:
        """Run one cell in the session of that name, which starts if there is none.

        If the caller has session state and the session is gone, the result reports that first.
        """
        if why := self._evicted.pop(name, ""):
            self._mark_reported(name)
            return ProgramResult(EVICTED, error=f"{why}: {SESSION_LOST}")
        self.evict_idle()
        session = self._open.get(name)
        if session is None and has_session_state and name not in self._reported_lost:
            self._mark_reported(name)
            return ProgramResult(CRASHED, error=f"its process was lost: {SESSION_LOST}")
        if session is None:
            idle = [other for other, known in self._open.items() if not known.pending_calls]
            if len(self._open) >= self._max_sessions and idle:
                why = (
                    f"{self._max_sessions} sessions were open, and this one was unused for longest"
                )
                self._evict(idle[0], why)
            if len(self._open) >= self._max_sessions:
                return ProgramResult(
                    REFUSED, error=f"{self._max_sessions} sessions are busy; try again"
                )
            session = self._open[name] = _CellSession(self._idle_clock.monotonic())
        session.pending_calls += 1
        try:
            async with session.lock:
                return await self._run_locked(name, session, source)
        finally:
            session.pending_calls -= 1
            if session.jail is None and not session.pending_calls:
                self._discard(name, session)

    async def _run_locked(self, name: str, session: _CellSession, source: str) -> ProgramResult:
        """Run one cell for the call that holds the session's lock.

        The first call starts the jail; if that fails, the next waiting call tries.
        """
        if session.jail is None and not session.is_closed:
            session.jail = await self._launcher.open(JailProgram(mode="cells"), self._limits)
            if session.is_closed:
                session.jail.close()
            else:
                self._reported_lost.pop(name, None)
        jail = session.jail
        if jail is None or session.is_closed:
            return ProgramResult(
                CRASHED, error=f"the session ended before the call: {SESSION_LOST}"
            )
        session.last_used_s = self._idle_clock.monotonic()
        self._open.move_to_end(name)
        try:
            ran = await self._run_cell(session, jail, source)
        except _ChannelCorrupted as spoiled:
            self._mark_reported(name)
            out, err = jail.stdout, jail.stderr
            self._discard(name, session)
            return ProgramResult(CRASHED, out, err, -9, error=f"{spoiled}: {SESSION_LOST}")
        except BaseException:
            self._discard(name, session)
            raise
        if ran is None:
            return await self._report_lost(name, session, jail)
        session.last_used_s = self._idle_clock.monotonic()
        return ran

    async def _report_lost(self, name: str, session: _CellSession, jail: Jail) -> ProgramResult:
        if self._open.get(name) is session:
            del self._open[name]
        session.is_closed = True
        self._mark_reported(name)
        ran = await jail.finish()
        status = CRASHED if ran.status == OK else ran.status
        error = f"{ran.error or 'the interpreter has exited'}: {SESSION_LOST}"
        return ProgramResult(
            status, ran.stdout, ran.stderr, ran.exit_code, ran.cpu_s, ran.wall_s, error
        )

    def _discard(self, name: str, session: _CellSession) -> None:
        """End the session and free its place, which another session may have by now."""
        if self._open.get(name) is session:
            del self._open[name]
        session.close()

    async def _run_cell(
        self, session: _CellSession, jail: Jail, source: str
    ) -> ProgramResult | None:
        """Return the result of a cell; None if the jail has ended, or will.

        Only a frame with the cell's token that arrives after the cell is an answer. The code of the
        cell can send it early, without an advantage: the session is paused from then on. A paused
        jail does not end, so a jail whose channel has ended is not waited for.
        """
        assert jail.guest_channel is not None
        if not jail.guest_channel.is_idle():
            if jail.has_ended():
                return None
            raise _ChannelCorrupted(
                CLOSED_CHANNEL if jail.guest_channel.is_eof else WROTE_TO_CHANNEL
            )
        session.cell_count += 1
        token = secrets.token_hex(8)
        jail.output.remaining_bytes = self._limits.output_bytes
        jail.stdout, jail.stderr  # noqa: B018  what threads of earlier cells have written since
        jail.start_lap()
        deadline_s = MAX_SLOWDOWN * self._limits.wall_s + GRACE_S
        try:
            frame = {"source": source, "number": session.cell_count, "token": token}
            await jail.guest_channel.send(self._clock, frame, SEND_S)
            answered = asyncio.ensure_future(jail.guest_channel.receive(self._clock, deadline_s))
            try:
                await asyncio.wait(
                    {answered, jail.output.over_limit}, return_when="FIRST_COMPLETED"
                )
                if jail.output.over_limit.done():
                    return None
                answer = await answered
            finally:
                answered.cancel()
                with contextlib.suppress(asyncio.CancelledError, PeerLost, BadMessage):
                    await answered
        except (PeerLost, DeadlineExceeded):
            return None
        except BadMessage:
            raise _ChannelCorrupted(WROTE_TO_CHANNEL) from None
        jail.pause()
        if answer.get("cell") != token:
            raise _ChannelCorrupted(WROTE_TO_CHANNEL)
        out, err = jail.stdout, jail.stderr
        if jail.output.over_limit.done():
            return None
        # The interpreter that reports it may have been changed by the model's code.
        reported_code = answer.get("exit")
        code = reported_code if type(reported_code) is int and 0 <= reported_code < 256 else 1
        status = {guest.OUT_OF_MEMORY_EXIT: OUT_OF_MEMORY, guest.DENIED_EXIT: REFUSED}.get(code, OK)
        refused = jail.take_denied_calls()
        error = describe_denial(refused) if status == REFUSED else ""
        return ProgramResult(status, out, err, code, error=error, denied_calls=refused)

    def evict_idle(self) -> None:
        """End sessions that have been idle for too long."""
        oldest = self._idle_clock.monotonic() - self._idle_timeout_s
        for name, session in list(self._open.items()):
            if session.last_used_s < oldest and not session.pending_calls:
                self._evict(name, f"idle for more than {self._idle_timeout_s:g} s")

    def _evict(self, name: str, why: str) -> None:
        self._open.pop(name).close()
        self._evicted[name] = why
        if len(self._evicted) > MAX_REMEMBERED:
            self._evicted.popitem(last=False)

    def _mark_reported(self, name: str) -> None:
        self._reported_lost[name] = None
        if len(self._reported_lost) > MAX_REMEMBERED:
            self._reported_lost.popitem(last=False)

    def end(self, name: str) -> None:
        """End the session of a finished trajectory; nothing happens if there is none."""
        self._evicted.pop(name, None)
        self._reported_lost.pop(name, None)
        session = self._open.pop(name, None)
        if session is not None:
            session.close()

    def close(self) -> None:
        for name in list(self._open):
            self.end(name)
