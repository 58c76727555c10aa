"""Tests in Python under the real pytest, in one jail together with the solution.

What tests there are is found without the solution, so that none is lost by its doing; each is asked
for by a token of its own. A jail that ends, or is silent for too long, fails the test that it was
asked for, and another one goes on behind it. What a program can forge is in docs/sandbox.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.grading import shapes, suites
from meshrl.common.grading.cases import BadTests
from meshrl.common.grading.support import Unsupported
from meshrl.services.sandbox.grading.code import attempt as attempts
from meshrl.services.sandbox.grading.code.attempt import RETRIES, Attempt, JailedTrial
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import Jail
from meshrl.services.sandbox.isolation.jails.program import Program
from meshrl.services.sandbox.isolation.resources.limits import MIB

PYTEST_BYTES = 64 * MIB  # address space of pytest itself, beside the solution's memory


@dataclass(frozen=True)
class Suites:
    """Jails with pytest, and what it has said of modules of tests, without a solution."""

    launcher: JailLauncher
    known: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict)
    looking: dict[str, asyncio.Lock] = field(default_factory=dict)


async def passed(attempt: Attempt, suite: Suites, source: str, tests: str) -> list[bool]:
    """Which of the tests the solution passes, in the order in which pytest runs them."""
    async with attempt.slots.one():
        known = await _known(attempt, suite, tests)

        async def trial() -> _PytestTrial:
            jail = await _jail(attempt, suite, tests, source)
            return _PytestTrial(attempt, jail, known)

        return await attempts.passed(attempt, trial, len(known))


class _PytestTrial(JailedTrial):
    """One session of pytest, which runs the tests that are `known` without a solution."""

    def __init__(self, attempt: Attempt, jail: Jail, known: list[str]) -> None:
        super().__init__(attempt, jail)
        self._jail, self._known = jail, known
        self._places: list[int | None] = []  # of each among those that it has collected

    async def begin(self, number: int) -> int | None:
        said = await _first_word(self.attempt, self._jail)
        if said is None:
            return None
        if not (collected := _names(said)):
            return 0
        self._places = _places(self._known, collected)
        plan = [place for place in self._places[number:] if place is not None]
        await self.attempt.tell(self._jail, {"plan": plan})  # else what is asked is not answered
        return len(self._known)

    async def passes(self, number: int) -> bool | None:
        if self._places[number] is None:  # it is not there any more
            return False
        token = secrets.token_hex(8)
        self.attempt.lap(self._jail)
        for frame in ({"test": number}, {"token": token}):
            await self.attempt.tell(self._jail, frame)
        said = await self.attempt.word(self._jail)
        if said is None or said.get("token") != token or said.get("test") != number:
            return None
        return str(said.get("outcome")) == "passed"


async def _jail(attempt: Attempt, suite: Suites, tests: str, source: str | None = None) -> Jail:
    limits = replace(attempt.limits, memory_bytes=attempt.limits.memory_bytes + PYTEST_BYTES)
    return await suite.launcher.open(Program(source, "suite", tests=tests), limits)


async def _known(attempt: Attempt, suite: Suites, tests: str) -> list[str]:
    """The names of the tests without their parameters, one for each set of them. Answers to one row
    come together: the first one looks.
    """
    try:
        async with suite.looking.setdefault(tests, asyncio.Lock()):
            if tests not in suite.known:
                suite.known[tests] = await _looked(attempt, suite, tests)
    finally:
        suite.looking.pop(tests, None)
    suite.known.move_to_end(tests)
    said = suite.known[tests]
    while len(suite.known) > shapes.KNOWN:
        suite.known.popitem(last=False)
    return _judged(said, suites.read(tests))


async def _looked(attempt: Attempt, suite: Suites, tests: str) -> dict[str, Any]:
    """What pytest says of tests without a solution. BadTests if it comes to no end."""
    for _ in range(RETRIES):
        jail = await _jail(attempt, suite, tests)
        try:
            said = await _first_word(attempt, jail)
            if said is not None:
                return said
            if await attempt.blames(jail):
                break
        finally:
            jail.close()
    raise BadTests(f"pytest does not collect them within {attempt.limits.cpu_s:g} s of CPU time")


def _judged(said: dict[str, Any], written: list[str]) -> list[str]:
    """The tests that there are, by a look at them without a solution."""
    if "absent" in said:
        fix = "install it there, or pip install 'meshrl[pytest]'"
        raise Unsupported(f"jails have no pytest ({said['absent']}): {fix}")
    if "broken" in said:
        module = str(said["module"])
        if module and module.partition(".")[0] != suites.SOLUTION:
            raise Unsupported(f"the tests import {module}, which jails do not have")
        if not said["used"]:
            raise BadTests(str(said["broken"]))
        return list(written)
    for entry in said["collected"]:
        if "lacks" in entry:
            raise Unsupported(f"{entry['id']} takes {entry['lacks']}, which pytest has not")
    names = _names(said)
    if said["used"]:  # a test may be made by what stood for the solution
        names += [name for name in written if name not in names]
    if not names:
        raise BadTests("pytest finds no test in it")
    return names


def _names(said: dict[str, Any] | None) -> list[str]:
    """The names of what was collected, without parameters; none for whatever else is said."""
    found = (said or {}).get("collected")
    entries = found if isinstance(found, list) else []
    return [str(e["id"]).partition("[")[0] for e in entries if isinstance(e, dict) and "id" in e]


def _places(known: list[str], collected: list[str]) -> list[int | None]:
    """Where each known test is among those that were collected with the solution."""
    by_name: dict[str, list[int]] = {}
    for place, name in enumerate(collected):
        by_name.setdefault(name, []).append(place)
    left = {name: iter(places) for name, places in by_name.items()}
    return [next(left.get(name, iter(())), None) for name in known]


async def _first_word(attempt: Attempt, jail: Jail) -> dict[str, Any] | None:
    """The first word; the jail's clock stands until it has taken as long as a test."""
    with contextlib.suppress(DeadlineExceeded):
        async with attempt.clock.timeout(attempt.limits.wall_s, "a collection of tests"):
            return await attempt.word(jail)
    jail.turn(True)
    said = await attempt.word(jail)
    jail.turn(False)
    return said
