"""The grading of one answer: what its styles of tests share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from meshrl.common.base.errors import BadMessage, DeadlineExceeded, PeerLost
from meshrl.services.sandbox.grading.code.equality import Tolerance
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import GRACE_S, SLOWEST, Jail, JailFailed, Ran
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots

CASE_S = 4.0  # CPU time for one case
SEND_S = 30.0  # for a jail to take a frame
LATE_CASES = 5  # cases that end their jail, mostly by time; later ones are not passed
RETRIES = 3  # for jails that ended before they were asked anything
STARVED_RETRIES = 1  # for jails to which the host gave no time


class Attempt:
    """Where an answer's tests run, within what limits, and how many of them ended their jail."""

    def __init__(
        self, launcher: JailLauncher, slots: JailSlots, limits: JailLimits, options: dict[str, Any]
    ) -> None:
        self.launcher, self.clock, self.slots = launcher, launcher.clock, slots
        self.options = options
        self.partial = bool(options.get("partial", True))
        self.tolerance = Tolerance.of(options)
        self.late = 0  # cases that ended their jail
        self._early = self._starved = 0  # jails that ended unasked, or for want of time
        case_s = float(options.get("case_s", CASE_S))
        memory = int(options.get("memory_mb", 0)) * MIB
        self.limits = limits.capped(wall_s=case_s, cpu_s=case_s, memory_bytes=memory)

    def over(self, passed: list[bool]) -> bool:
        """Whether the rest need not be run: nothing can be gained, or it has taken too long."""
        return self.late >= LATE_CASES or not (self.partial or all(passed))

    async def blames(self, jail: Jail) -> bool:
        """True if the end of a jail that answers no more is the program's doing.

        False: another jail is to be asked. JailFailed if the jail has ended without its keeper's
        report, or if too many jails of this answer had no time or were not asked in time.
        """
        if not (jail.keeper.ended or (jail.cells is not None and jail.cells.ended)):
            return True
        ran = await jail.finish()
        if ran.starved:
            self.starved(ran)
            return False
        if ran.laps >= jail.laps:
            return True
        self._early += 1
        if self._early > RETRIES and ran.by_clock:
            raise JailFailed(
                f"{self._early} jails ran out of wall clock time before they were asked anything",
                where="sandbox",
                fix="This host is too slow for its jails: run fewer at once (`--jails`)",
            )
        return self._early > RETRIES

    def starved(self, ran: Ran) -> None:
        """Counts a jail to which the host gave no time. JailFailed if there were too many."""
        self._starved += 1
        if self._starved > STARVED_RETRIES:
            raise JailFailed(
                f"the host gave {self._starved} jails of one answer no time to run: the last had "
                f"{ran.cpu_s:.2f} s of CPU time in {ran.wall_s:.0f} s, and did not sleep by choice",
                where="sandbox",
                fix="Run fewer jails at once on this host (`--jails`), or raise options.case_s",
            )

    # ---- words with a jail --------------------------------------------------------------------

    def lap(self, jail: Jail, waits: bool = False) -> None:
        jail.lap(waits)
        jail.output.left = self.limits.output_bytes

    async def tell(self, jail: Jail, frame: dict[str, Any]) -> bool:
        """Send a frame to the guest; False if its jail has ended."""
        assert jail.cells is not None
        try:
            await jail.cells.send(self.clock, frame, SEND_S)
        except PeerLost:
            return False
        return True

    async def word(self, jail: Jail, more_s: float = 0.0) -> dict[str, Any] | None:
        """Return the next frame of the guest; None if its jail has ended, or speaks garbage.

        JailFailed where a jail is silent for longer than its keeper lets it be.
        """
        assert jail.cells is not None
        try:
            patience_s = SLOWEST * self.limits.wall_s + more_s + GRACE_S
            said: dict[str, Any] = await jail.cells.receive(self.clock, patience_s)
        except (PeerLost, BadMessage):
            return None
        except DeadlineExceeded as error:
            raise JailFailed(f"a jail hangs: {error.message}", where="sandbox") from error
        return said


class JailedTrial(ABC):
    """Jails in which tests run one after the other, until one of them ends."""

    def __init__(self, attempt: Attempt, *jails: Jail) -> None:
        self.attempt, self.jails = attempt, jails

    @abstractmethod
    async def begin(self, number: int) -> int | None:
        """Return how many tests there are, of which `number` is the next; None if a jail has ended;
        0 if the solution does not load.
        """

    @abstractmethod
    async def passes(self, number: int) -> bool | None:
        """Return whether that test is passed; None if a jail has ended."""

    async def is_blamed(self) -> bool:
        return all([await self.attempt.blames(jail) for jail in self.jails])


async def passed(
    attempt: Attempt, trial_of: Callable[[], Awaitable[JailedTrial]], count: int = 1
) -> list[bool]:
    """Return which tests are passed. A trial serves them all, and another goes on behind the test
    in which its jails ended. `count` is how many there are, as far as one knows before.
    """
    found: list[bool] = []
    while len(found) < count and not attempt.over(found):
        trial = await trial_of()
        try:
            begun = await trial.begin(len(found))
            if begun is None and not await trial.is_blamed():
                continue
            if not begun:
                break
            count = begun
            while len(found) < count and not attempt.over(found):
                verdict = await trial.passes(len(found))
                if verdict is None and not await trial.is_blamed():
                    break  # other jails are asked
                found.append(verdict is True)
                if verdict is None:
                    attempt.late += 1
                    break
        finally:
            for jail in trial.jails:
                jail.close()
    return found + [False] * (count - len(found))
