"""The grading of one answer: what its styles of tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from common.errors import DeadlineExceeded
from services.sandbox.grading.equality import Tolerance
from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.jails import Jail, JailFailed
from services.sandbox.isolation.limits import MIB, JailLimits
from services.sandbox.isolation.slots import JailSlots

CASE_S = 4.0  # CPU time for one case
SEND_S = 30.0  # for a jail to take a frame
LATE_CASES = 5  # cases that end their jail, mostly by time; later ones are not passed
RETRIES = 3  # for jails that ended before they were asked anything


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
        case_s = float(options.get("case_s", CASE_S))
        memory = int(options.get("memory_mb", 0)) * MIB
        self.limits = limits.capped(wall_s=case_s, cpu_s=case_s, memory_bytes=memory)

    def over(self, passed: list[bool]) -> bool:
        """Whether the rest need not be run: nothing can be gained, or it has taken too long."""
        if not self.partial and not all(passed):
            return True
        return self.late >= LATE_CASES


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """JailFailed where a jail is silent for longer than its keeper lets it be."""
    try:
        yield
    except DeadlineExceeded as error:
        raise JailFailed(f"a jail hangs: {error.message}", where="sandbox") from error


async def ended(jail: Jail) -> bool:
    """Whether a jail that answers no more had begun with what it was asked last: if so, its end is
    the program's doing. JailFailed if it has ended without its keeper's word, which is not.
    """
    if not (jail.keeper.ended or (jail.cells is not None and jail.cells.ended)):
        return True
    return (await jail.finish()).laps >= jail.laps
