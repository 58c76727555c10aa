"""A sandbox that lags takes no time from the programs that it grades."""

from __future__ import annotations

import time
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.services.sandbox.grading.code.attempt import STARVED_RETRIES, Attempt
from meshrl.services.sandbox.grading.code.grading import Grading
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import Jail, JailFailed, Ran
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots

CASE_S, LAG_S = 0.2, 0.6
CALLS = {"function": "f", "cases": [{"args": [1], "output": 2}, {"args": [2], "output": 3}]}
UNIT = "from solution import f\ndef test_one(): assert f(1) == 2\ndef test_two(): assert f(2) == 3"
RIGHT = "def f(x): return x + 1"
SLEEPS = "import time\ntime.sleep(1000)\n" + RIGHT
OPTIONS = {"case_s": CASE_S}


class Lagging:
    """A launcher in a process that stands still after each jail that it has opened."""

    def __init__(self, launcher: JailLauncher) -> None:
        self._launcher = launcher
        self.clock, self.tier, self.opened = launcher.clock, launcher.tier, 0

    async def open(self, *arguments: Any, **options: Any) -> Jail:
        jail = await self._launcher.open(*arguments, **options)
        self.opened += 1
        time.sleep(LAG_S)  # noqa: ASYNC251 - the loop stands still
        return jail


def graded(launcher: Any) -> Grading:
    return Grading(launcher, JailSlots(SystemClock(), 4), JailLimits(), OPTIONS)


@pytest.mark.needs("bwrap")
async def test_right_program_passes_when_its_first_question_comes_late(
    launcher: JailLauncher,
) -> None:
    for tests, jails in ((CALLS, 1), (UNIT, 2)):
        lagging = Lagging(launcher)
        turns = [{"role": "model", "text": RIGHT}]
        answer = await graded(lagging).reward({"tests": tests}, turns)
        assert (answer.status, answer.value, lagging.opened) == ("ok", 1.0, jails), tests


@pytest.mark.needs("bwrap")
async def test_program_that_sleeps_at_its_start_is_not_passed(launcher: JailLauncher) -> None:
    for tests in (CALLS, UNIT):
        answer = await graded(launcher).reward(
            {"tests": tests}, [{"role": "model", "text": SLEEPS}]
        )
        assert (answer.status, answer.value) == ("ok", 0.0), tests


def test_starved_jails_are_retried_and_then_a_typed_error() -> None:
    launcher: Any = Lagging.__new__(Lagging)
    launcher.clock = SystemClock()
    attempt = Attempt(launcher, JailSlots(launcher.clock, 1), JailLimits(), OPTIONS)
    ran = Ran("timeout", b"", b"", -9, cpu_s=0.01, wall_s=22.0, by_clock=True, starved=True)
    for _ in range(STARVED_RETRIES):
        attempt.starved(ran)
    with pytest.raises(JailFailed, match=r"no time to run.*0.01 s of CPU time in 22 s"):
        attempt.starved(ran)
