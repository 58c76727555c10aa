"""The grading of one answer: what its styles of tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from common.base.errors import DeadlineExceeded
from services.sandbox.grading.code.equality import Tolerance
from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.jails.jail import Jail, JailFailed, Ran
from services.sandbox.isolation.resources.limits import MIB, JailLimits
from services.sandbox.isolation.resources.slots import JailSlots

CASE_S = 4.0  # CPU time for one case
SEND_S = 30.0  # for a jail to take a frame
LATE_CASES = 5  # cases that end their jail, mostly by time; later ones are not passed
RETRIES = 3  # for jails that ended before they were asked anything
STARVED_RETRIES = 1  # for jails to which the host gave no time


class Attempt:
    """Where an answer's tests run, within what limits, and how many of them ended their jail."""

    def __init__(
        self,
        launcher: JailLauncher,
        slots: JailSlots,
        limits: JailLimits,
        options: dict[str, Any],
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
        if not self.partial and not all(passed):
            return True
        return self.late >= LATE_CASES

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


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """JailFailed where a jail is silent for longer than its keeper lets it be."""
    try:
        yield
    except DeadlineExceeded as error:
        raise JailFailed(f"a jail hangs: {error.message}", where="sandbox") from error
