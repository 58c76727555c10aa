"""Python tests under the real pytest, in one jail together with the solution.

The tests are listed without the solution, so that it cannot hide one. Each is requested with a
token of its own. A jail that ends, or is silent for too long, fails the requested test, and another
jail continues after it. docs/use/rewards.md lists what a program can forge.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.grading import python_tests, styles
from meshrl.common.grading.cases import InvalidTests
from meshrl.common.grading.isolated_support import UnsupportedTests
from meshrl.services.sandbox.grading.code import attempt as attempts
from meshrl.services.sandbox.grading.code.attempt import (
    MAX_EARLY_EXITS,
    GradingAttempt,
    JailedTrial,
)
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import Jail
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources.limits import MIB

PYTEST_BYTES = 64 * MIB  # address space of pytest itself, beside the solution's memory


@dataclass(frozen=True)
class PytestJails:
    """Jails with pytest, and its collections of test modules without a solution."""

    launcher: JailLauncher
    collections: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict)
    collection_locks: dict[str, asyncio.Lock] = field(default_factory=dict)


async def run_tests(
    attempt: GradingAttempt, pytest_jails: PytestJails, source: str, tests: str
) -> list[bool]:
    """Return which of the tests the solution passes, in the order in which pytest runs them."""
    async with attempt.slots.acquire():
        known = await _list_expected_tests(attempt, pytest_jails, tests)

        async def trial() -> _PytestTrial:
            jail = await _open_jail(attempt, pytest_jails, tests, source)
            return _PytestTrial(attempt, jail, known)

        return await attempts.run_trials(attempt, trial, len(known))


class _PytestTrial(JailedTrial):
    """Session of pytest that runs the tests that are known without a solution."""

    def __init__(self, attempt: GradingAttempt, jail: Jail, expected_tests: list[str]) -> None:
        super().__init__(attempt, jail)
        self._jail, self._expected_tests = jail, expected_tests
        self._collected_indices: list[int | None] = []  # index of each among those collected

    async def start(self, next_test: int) -> int | None:
        collection = await _receive_collection(self.attempt, self._jail)
        if collection is None:
            return None
        if not (collected := _test_names(collection)):
            return 0
        self._collected_indices = _match_tests(self._expected_tests, collected)
        plan = [place for place in self._collected_indices[next_test:] if place is not None]
        await self.attempt.send(self._jail, {"plan": plan})  # otherwise it answers no request
        return len(self._expected_tests)

    async def run_test(self, number: int) -> bool | None:
        if self._collected_indices[number] is None:  # no longer present
            return False
        token = secrets.token_hex(8)
        self.attempt.start_lap(self._jail)
        for frame in ({"test": number}, {"token": token}):
            await self.attempt.send(self._jail, frame)
        report = await self.attempt.receive(self._jail)
        if report is None or report.get("token") != token or report.get("test") != number:
            return None
        return str(report.get("outcome")) == "passed"


async def _open_jail(
    attempt: GradingAttempt, pytest_jails: PytestJails, tests: str, source: str | None = None
) -> Jail:
    limits = replace(attempt.limits, memory_bytes=attempt.limits.memory_bytes + PYTEST_BYTES)
    return await pytest_jails.launcher.open(JailProgram(source, "suite", tests=tests), limits)


async def _list_expected_tests(
    attempt: GradingAttempt, pytest_jails: PytestJails, tests: str
) -> list[str]:
    """Return the names of the tests without parameters, one for each set of them.

    Answers to one row arrive together, so the first one collects for all.
    """
    try:
        async with pytest_jails.collection_locks.setdefault(tests, asyncio.Lock()):
            if tests not in pytest_jails.collections:
                pytest_jails.collections[tests] = await _collect_without_solution(
                    attempt, pytest_jails, tests
                )
    finally:
        pytest_jails.collection_locks.pop(tests, None)
    pytest_jails.collections.move_to_end(tests)
    collection = pytest_jails.collections[tests]
    while len(pytest_jails.collections) > styles.CACHED_MODULES:
        pytest_jails.collections.popitem(last=False)
    return _check_collection(collection, python_tests.list_test_names(tests))


async def _collect_without_solution(
    attempt: GradingAttempt, pytest_jails: PytestJails, tests: str
) -> dict[str, Any]:
    """Return pytest's collection of tests without a solution; InvalidTests if it never ends."""
    for _ in range(MAX_EARLY_EXITS):
        jail = await _open_jail(attempt, pytest_jails, tests)
        try:
            collection = await _receive_collection(attempt, jail)
            if collection is not None:
                return collection
            if await attempt.is_program_at_fault(jail):
                break
        finally:
            jail.close()
    raise InvalidTests(
        f"pytest does not collect the tests within {attempt.limits.cpu_s:g} s of CPU time"
    )


def _check_collection(collection: dict[str, Any], written: list[str]) -> list[str]:
    """Validate a collection made without a solution, and return the names of its tests."""
    if "absent" in collection:
        fix = "install it in their interpreter, or run pip install 'meshrl[pytest]'"
        raise UnsupportedTests(f"jails have no pytest ({collection['absent']}): {fix}")
    if "broken" in collection:
        module = str(collection["module"])
        if module and module.partition(".")[0] != python_tests.SOLUTION_MODULE:
            raise UnsupportedTests(f"the tests import {module}, which jails do not have")
        if not collection["used"]:
            raise InvalidTests(str(collection["broken"]))
        return list(written)
    for entry in collection["collected"]:
        if "lacks" in entry:
            raise UnsupportedTests(
                f"{entry['id']} needs {entry['lacks']}, which pytest does not have"
            )
    names = _test_names(collection)
    if collection["used"]:  # the placeholder of the solution may have made a test
        names += [name for name in written if name not in names]
    if not names:
        raise InvalidTests("pytest finds no tests")
    return names


def _test_names(collection: dict[str, Any] | None) -> list[str]:
    """Return the names of collected tests without parameters; none for an invalid message."""
    found = (collection or {}).get("collected")
    entries = found if isinstance(found, list) else []
    return [str(e["id"]).partition("[")[0] for e in entries if isinstance(e, dict) and "id" in e]


def _match_tests(expected_tests: list[str], collected: list[str]) -> list[int | None]:
    """Return the index of each expected test among those collected with the solution."""
    by_name: dict[str, list[int]] = {}
    for place, name in enumerate(collected):
        by_name.setdefault(name, []).append(place)
    remaining_places = {name: iter(places) for name, places in by_name.items()}
    return [next(remaining_places.get(name, iter(())), None) for name in expected_tests]


async def _receive_collection(attempt: GradingAttempt, jail: Jail) -> dict[str, Any] | None:
    """Return the first message; the jail's clock is paused until it has taken as long as a test."""
    with contextlib.suppress(DeadlineExceeded):
        async with attempt.clock.timeout(attempt.limits.wall_s, "collecting tests with pytest"):
            return await attempt.receive(jail)
    jail.set_clock_running(True)
    report = await attempt.receive(jail)
    jail.set_clock_running(False)
    return report
