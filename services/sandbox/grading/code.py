"""The reward `code_tests`: the share of its tests that a program passes.

No test is where the program can read or change it. Cases with standard input and output, and calls
of a function, are compared here, after the program has answered; tests in Python run in a jail of
their own (see `jail.remote`). A case that runs out of its limits, or whose program dies, is not
passed. That no jail can be made, or that the tests themselves are broken, is an error, not a score.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from common.api.sandbox import BAD_VALUE, CRASHED, OK, RAISED, TIMEOUT
from common.errors import BadMessage, DeadlineExceeded, PeerLost
from services.sandbox.answer import Answer
from services.sandbox.grading.answers import answer_of, code_of
from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.jails import GRACE_S, SLOWEST, Jail, JailFailed
from services.sandbox.isolation.limits import MIB, JailLimits
from services.sandbox.isolation.slots import JailSlots

CASE_S = 4.0  # CPU time for one case
TESTS_BYTES = 256 * MIB  # memory of the jail that holds tests in Python
SEND_S = 30.0
WAITING_S = 10.0  # longest wait of solution and tests for each other, beside their own time
LATE_CASES = 5  # cases that end their jail, mostly by time; later ones are not passed
RETRIES = 3  # for jails that ended before they were asked anything


class BadTests(Exception):
    """The row's tests are none."""


class Grading:
    """The grading of one answer."""

    def __init__(
        self,
        launcher: JailLauncher,
        slots: JailSlots,
        job: str,
        limits: JailLimits,
        options: dict[str, Any],
    ) -> None:
        self._launcher, self._clock, self._slots = launcher, launcher.clock, slots
        self._job, self._options = job, options
        self._partial = bool(options.get("partial", True))
        self._late = 0  # cases that ended their jail
        case_s = float(options.get("case_s", CASE_S))
        memory = int(options.get("memory_mb", 0)) * MIB
        self._limits = limits.capped(wall_s=case_s, cpu_s=case_s, memory_bytes=memory)

    async def reward(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> Answer:
        """The share of tests passed; all or nothing without `partial`."""
        answer = answer_of(turns, self._options)
        source = str(self._options.get("prefix", "")) + code_of(answer)
        try:
            tests = row[self._options.get("tests", "tests")]
            passed = await self._passed(source, tests) if answer.strip() else [False]
        except (BadTests, KeyError, TypeError, ValueError) as error:
            return Answer(BAD_VALUE, None, f"tests: {type(error).__name__}: {error}")
        except JailFailed as error:
            return Answer(CRASHED, None, str(error))
        if not passed:
            return Answer(RAISED, None, "the row has no tests")
        score = sum(passed) / len(passed)
        return Answer(OK, score if self._partial else float(all(passed)), "")

    async def _passed(self, source: str, tests: Any) -> list[bool]:
        if isinstance(tests, str):
            return await self._python(source, tests)
        if isinstance(tests, dict):
            return await self._calls(source, str(tests["function"]), list(tests["cases"]))
        passed: list[bool] = []
        while len(passed) < len(tests) and not self._over(passed):
            passed.append(await self._printed(source, tests[len(passed)]))
        return passed + [False] * (len(tests) - len(passed))

    def _over(self, passed: list[bool]) -> bool:
        """Whether the rest need not be run: nothing can be gained, or it has taken too long."""
        if not self._partial and not all(passed):
            return True
        return self._late >= LATE_CASES

    # ---- standard input and output

    async def _printed(self, source: str, case: dict[str, Any]) -> bool:
        stdin, wanted = str(case["input"]).encode(), str(case["output"]).split()
        async with self._slots.of(self._job):
            program = {"mode": "program", "source": source}
            ran = await self._launcher.run(program, self._limits, stdin)
        self._late += ran.status == TIMEOUT
        said = ran.stdout.decode("utf-8", "replace").split()
        return ran.status == OK and ran.exit == 0 and said == wanted

    # ---- calls of a function

    async def _calls(self, source: str, function: str, cases: list[Any]) -> list[bool]:
        """One jail serves all calls, and another goes on after the one in which it ended."""
        passed: list[bool] = []
        program = {"mode": "calls", "source": source, "function": function}
        async with self._slots.of(self._job):
            early = 0  # jails that ended before they were asked
            while len(passed) < len(cases) and not self._over(passed):
                jail = await self._launcher.open(program, self._limits, cells=True)
                try:
                    if await self._answer(jail, {}) is None:  # it does not even load
                        await _ended(jail)
                        break
                    while len(passed) < len(cases) and not self._over(passed):
                        answer = await self._answer(jail, cases[len(passed)])
                        if answer is None and not await _ended(jail) and early < RETRIES:
                            early += 1
                            break  # another jail is asked
                        passed.append(_right(answer, cases[len(passed)]))
                        if answer is None:
                            self._late += 1
                            break
                finally:
                    jail.close()
        return passed + [False] * (len(cases) - len(passed))

    async def _answer(self, jail: Jail, case: dict[str, Any]) -> dict[str, Any] | None:
        """What the guest says to a call, or to nothing at its start; None if it has ended."""
        assert jail.cells is not None
        token = secrets.token_hex(8)
        with contextlib.suppress(PeerLost, BadMessage), _answering():
            if case:
                jail.lap()
                jail.output.left = self._limits.output_bytes
                asked = {"call": token, "args": case["args"], "kwargs": case.get("kwargs", {})}
                await jail.cells.send(self._clock, asked, SEND_S)
            patience = SLOWEST * self._limits.wall_s + GRACE_S
            waited = asyncio.ensure_future(jail.cells.receive(self._clock, patience))
            try:
                await asyncio.wait({waited, jail.output.over}, return_when="FIRST_COMPLETED")
                if waited.done():
                    found: dict[str, Any] = waited.result()
                    return found if not case or found.get("call") == token else None
            finally:
                waited.cancel()
                await asyncio.gather(waited, return_exceptions=True)
        return None

    # ---- tests in Python

    async def _python(self, source: str, tests: str) -> list[bool]:
        passed: list[bool] = []
        count = 1
        async with self._slots.of(self._job):
            early = 0
            while len(passed) < count and not self._over(passed):
                pair = await self._pair(source, tests)
                try:
                    count = await self._collected(pair[1])
                    if not count:  # the solution does not load
                        await _both_ended(pair)
                        break
                    while len(passed) < count and not self._over(passed):
                        verdict = await self._test(pair, len(passed))
                        over = verdict is None or verdict.get("lost") is True
                        if over and not await _both_ended(pair) and early < RETRIES:
                            early += 1
                            break
                        passed.append(verdict is not None and verdict.get("passed") is True)
                        if over:
                            self._late += 1
                            break
                finally:
                    for jail in pair:
                        jail.close()
        count = max(count, 1)
        return passed[:count] + [False] * (count - len(passed))

    async def _pair(self, source: str, tests: str) -> tuple[Jail, Jail]:
        """The solution's jail, and that of its tests, which speak through a socket pair."""
        one, other = socket.socketpair()
        solution: Jail | None = None
        try:
            program = {"mode": "objects", "source": source}
            # By the clock each also waits for the other; CPU time counts as ever.
            limits = replace(self._limits, wall_s=SLOWEST * self._limits.wall_s + WAITING_S)
            solution = await self._launcher.open(program, limits, peer=one.fileno())
            program = {"mode": "tests", "source": tests}
            limits = limits.capped(memory_bytes=TESTS_BYTES)
            return solution, await self._launcher.open(
                program, limits, cells=True, peer=other.fileno()
            )
        except BaseException:
            if solution is not None:
                solution.close()
            raise
        finally:
            one.close()
            other.close()

    async def _collected(self, jail: Jail) -> int:
        """How many tests there are; 0 if the solution does not load."""
        said = await self._said(jail)
        if said is None:
            return 0
        if "broken" in said:
            raise BadTests(str(said["broken"]))
        if said.get("ready") is True and not said["tests"]:
            raise BadTests("there is no function test_*")
        return len(said["tests"])

    async def _test(self, pair: tuple[Jail, Jail], number: int) -> dict[str, Any] | None:
        for jail in pair:
            jail.lap()
            jail.output.left = self._limits.output_bytes
        cells = pair[1].cells
        assert cells is not None
        try:
            await cells.send(self._clock, {"test": number}, SEND_S)
        except PeerLost:
            return None
        verdict = await self._said(pair[1])
        return verdict if verdict is not None and verdict.get("test") == number else None

    async def _said(self, jail: Jail) -> dict[str, Any] | None:
        """The next word of a jail with tests; None if it has ended. Only words that carry the
        nonce count, and no code of the model's has ever been in that jail.
        """
        assert jail.cells is not None
        patience = SLOWEST * self._limits.wall_s + WAITING_S + GRACE_S
        try:
            with _answering():
                frame: dict[str, Any] = await jail.cells.receive(self._clock, patience)
        except (PeerLost, BadMessage):
            return None
        return frame if frame.get("nonce") == jail.nonce else None


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """JailFailed where a jail is silent for longer than its keeper lets it be."""
    try:
        yield
    except DeadlineExceeded as error:
        raise JailFailed(f"a jail hangs: {error.message}", where="sandbox") from error


async def _ended(jail: Jail) -> bool:
    """Whether a jail that answers no more had begun with what it was asked last: if so, its end is
    the program's doing. JailFailed if it has ended without its keeper's word, which is not.
    """
    if not (jail.keeper.ended or (jail.cells is not None and jail.cells.ended)):
        return True
    return (await jail.finish()).laps >= jail.laps


async def _both_ended(pair: tuple[Jail, Jail]) -> bool:
    """Both had begun; see `_ended`."""
    begun = [await _ended(jail) for jail in pair]
    return all(begun)


def _right(answer: dict[str, Any] | None, case: dict[str, Any]) -> bool:
    return answer is not None and "value" in answer and same(answer["value"], case["output"])


def same(found: Any, wanted: Any) -> bool:
    """Equality of JSON values; floats may differ by rounding, true is not 1."""
    if isinstance(wanted, bool) or isinstance(found, bool):
        return found is wanted
    if isinstance(wanted, float) or isinstance(found, float):
        if not (isinstance(found, int | float) and isinstance(wanted, int | float)):
            return False
        try:
            return math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-9)
        except OverflowError:  # a whole number beyond all floats
            return False
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(map(same, found, wanted))
    if isinstance(wanted, dict) and isinstance(found, dict):
        return wanted.keys() == found.keys() and all(same(found[k], wanted[k]) for k in wanted)
    return type(found) is type(wanted) and bool(found == wanted)
