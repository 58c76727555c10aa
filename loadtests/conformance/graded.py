"""Has the product grade the conformance set: each solution as the answer of a model."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable
from pathlib import Path

from loadtests.conformance.rows import Row
from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.grading.code.grading import Grading
from meshrl.services.sandbox.grading.code.real_pytest import Suites
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter, with_pytest
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.outcomes import Answer

Answers = dict[tuple[str, str], Answer]  # by row and solution


async def graded(rows: Iterable[Row], jobs: int, runner: str) -> Answers:
    """What `code_tests` says of every solution, with so many graded at a time."""
    clock = SystemClock()
    slots = JailSlots(clock, jobs)
    turns = asyncio.Semaphore(2 * jobs)
    found: Answers = {}
    with tempfile.TemporaryDirectory(prefix="conformance-") as place:
        log = Path(place, "jails.log")
        launcher = JailLauncher(
            SystemHost(), clock, "bwrap", Interpreter.own(), cgroups.find(), log
        )
        await launcher.start()
        interpreter = with_pytest(Interpreter.own())
        suites = Suites(
            JailLauncher(SystemHost(), clock, "bwrap", interpreter, cgroups.find(), log)
        )

        async def one(row: Row, which: str) -> None:
            text = f"The program:\n\n```python\n{row.solutions[which]}```\n"
            turn = {"role": "model", "text": text}
            options = {"runner": runner}
            async with turns:
                grading = Grading(launcher, slots, JailLimits(), options, suites)
                found[row.name, which] = await grading.reward({"tests": row.tests}, [turn])

        try:
            await asyncio.gather(*(one(row, which) for row in rows for which in row.solutions))
        finally:
            await launcher.stop()
            await suites.launcher.stop()
    return found
