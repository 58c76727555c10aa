"""Sessions: interpreters that keep their state from call to call of a trajectory, each in a
jail.
"""

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
from meshrl.services.sandbox.isolation.jails.jail import GRACE_S, SLOWEST, Jail, Ran, wanted
from meshrl.services.sandbox.isolation.jails.program import Program
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.jail.guests import guest

REMEMBERED = 4096  # evicted sessions whose next call is told so
SEND_S = 30.0
SPOILED = "its code wrote where the interpreter answers"
SHUT = "its code closed where the interpreter answers"
LOST = "the session has ended; what it held is gone, and the next call begins a new one"


class _Spoiled(Exception):
    """Something else than the interpreter's answer has come; its text is told."""


@dataclass
class _CellSession:
    """A place taken, from before its jail starts until it is ended."""

    used: float
    jail: Jail | None = None  # none yet
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: int = 0  # calls that run or wait for the lock
    cells: int = 0
    ended: bool = False

    def end(self) -> None:
        """Closes its jail, or tells the call that starts one to close it."""
        self.ended = True
        if self.jail is not None:
            self.jail.close()


class Sessions:
    """The sessions of one job: at most `most` at a time, each ended after `idle_s` idle."""

    def __init__(
        self,
        launcher: JailLauncher,
        clock: Clock,
        limits: JailLimits,
        most: int,
        idle_s: float,
        job_clock: Clock | None = None,
    ) -> None:
        """`job_clock`: by which they are idle; it may stand still."""
        self._launcher, self._clock, self._limits = launcher, clock, limits
        self._most, self._idle_s, self._idle = most, idle_s, job_clock or clock
        self._open: OrderedDict[str, _CellSession] = OrderedDict()  # in the order of their last use
        self._evicted: OrderedDict[str, str] = OrderedDict()  # name -> why
        self._told: OrderedDict[str, None] = OrderedDict()  # sessions whose end has been told

    @property
    def size(self) -> int:
        return len(self._open)

    async def run(self, name: str, source: str, begun: bool = False) -> Ran:
        """One cell in the session of that name, which is begun if there is none.

        Where the caller knows of one that has `begun` and there is none, it is told so first.
        """
        if why := self._evicted.pop(name, ""):
            self._tell(name)
            return Ran(EVICTED, error=f"{why}: {LOST}")
        self.sweep()
        session = self._open.get(name)
        if session is None and begun and name not in self._told:
            self._tell(name)
            return Ran(CRASHED, error=f"its process was lost: {LOST}")
        if session is None:
            idle = [other for other, known in self._open.items() if not known.calls]
            if len(self._open) >= self._most and idle:
                why = f"{self._most} sessions were open, this one unused for longest"
                self._evict(idle[0], why)
            if len(self._open) >= self._most:
                return Ran(REFUSED, error=f"{self._most} sessions are busy; try again")
            session = self._open[name] = _CellSession(self._idle.monotonic())
        session.calls += 1
        try:
            async with session.lock:
                return await self._next(name, session, source)
        finally:
            session.calls -= 1
            if session.jail is None and not session.calls:
                self._forget(name, session)

    async def _next(self, name: str, session: _CellSession, source: str) -> Ran:
        """One cell, of the call that holds the session's lock.

        The first call starts the jail; should it fail, the next that waits tries in its turn.
        """
        if session.jail is None and not session.ended:
            session.jail = await self._launcher.open(Program(mode="cells"), self._limits)
            if session.ended:
                session.jail.close()
            else:
                self._told.pop(name, None)
        jail = session.jail
        if jail is None or session.ended:
            return Ran(CRASHED, error=f"it was ended meanwhile: {LOST}")
        session.used = self._idle.monotonic()
        self._open.move_to_end(name)
        try:
            ran = await self._cell(session, jail, source)
        except _Spoiled as spoiled:
            self._tell(name)
            out, err = jail.stdout, jail.stderr
            self._forget(name, session)
            return Ran(CRASHED, out, err, -9, error=f"{spoiled}: {LOST}")
        except BaseException:
            self._forget(name, session)
            raise
        if ran is None:
            return await self._lost(name, session, jail)
        session.used = self._idle.monotonic()
        return ran

    async def _lost(self, name: str, session: _CellSession, jail: Jail) -> Ran:
        if self._open.get(name) is session:
            del self._open[name]
        session.ended = True
        self._tell(name)
        ran = await jail.finish()
        status = CRASHED if ran.status == OK else ran.status
        error = f"{ran.error or 'the interpreter has ended'}: {LOST}"
        return Ran(status, ran.stdout, ran.stderr, ran.exit, ran.cpu_s, ran.wall_s, error)

    def _forget(self, name: str, session: _CellSession) -> None:
        """Ends the session and frees its place, which may be another's by now."""
        if self._open.get(name) is session:
            del self._open[name]
        session.end()

    async def _cell(self, session: _CellSession, jail: Jail, source: str) -> Ran | None:
        """What a cell came to; None if the jail has ended, or will.

        Only what comes after the cell, with its token, is an answer. The code of the cell can give
        it early, and gains nothing: the session stands still from then on. A jail that stands
        still does not end, so one whose channel has ended meanwhile is not waited for.
        """
        assert jail.cells is not None
        if not jail.cells.silent():
            if jail.over():
                return None
            raise _Spoiled(SHUT if jail.cells.ended else SPOILED)
        session.cells += 1
        token = secrets.token_hex(8)
        jail.output.left = self._limits.output_bytes
        jail.stdout, jail.stderr  # noqa: B018  what threads of earlier cells have written since
        jail.lap()
        deadline_s = SLOWEST * self._limits.wall_s + GRACE_S
        try:
            frame = {"source": source, "number": session.cells, "token": token}
            await jail.cells.send(self._clock, frame, SEND_S)
            answered = asyncio.ensure_future(jail.cells.receive(self._clock, deadline_s))
            try:
                await asyncio.wait({answered, jail.output.over}, return_when="FIRST_COMPLETED")
                if jail.output.over.done():
                    return None
                answer = await answered
            finally:
                answered.cancel()
                with contextlib.suppress(asyncio.CancelledError, PeerLost, BadMessage):
                    await answered
        except (PeerLost, DeadlineExceeded):
            return None
        except BadMessage:
            raise _Spoiled(SPOILED) from None
        jail.pause()
        if answer.get("cell") != token:
            raise _Spoiled(SPOILED)
        out, err = jail.stdout, jail.stderr
        if jail.output.over.done():
            return None
        said = answer.get("exit")  # by an interpreter that the model's code may have changed
        code = said if type(said) is int and 0 <= said < 256 else 1
        status = {guest.OUT_OF_MEMORY: OUT_OF_MEMORY, guest.REFUSED: REFUSED}.get(code, OK)
        refused = jail.refuses()
        error = wanted(refused) if status == REFUSED else ""
        return Ran(status, out, err, code, error=error, refused=refused)

    def sweep(self) -> None:
        """Ends sessions that nobody has used for too long."""
        oldest = self._idle.monotonic() - self._idle_s
        for name, session in list(self._open.items()):
            if session.used < oldest and not session.calls:
                self._evict(name, f"idle for over {self._idle_s:g} s")

    def _evict(self, name: str, why: str) -> None:
        self._open.pop(name).end()
        self._evicted[name] = why
        if len(self._evicted) > REMEMBERED:
            self._evicted.popitem(last=False)

    def _tell(self, name: str) -> None:
        self._told[name] = None
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)

    def end(self, name: str) -> None:
        """Ends the session of a trajectory that is over; nothing happens if there is none."""
        self._evicted.pop(name, None)
        self._told.pop(name, None)
        session = self._open.pop(name, None)
        if session is not None:
            session.end()

    def close(self) -> None:
        for name in list(self._open):
            self.end(name)
