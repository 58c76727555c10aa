"""Tests in Python in a jail of their own, which uses the solution's objects across a pipe.

See `jail.remote` for what may be asked of the solution, and `jail.checking` for what runs the
tests. No code that the model wrote has ever been in the tests' jail.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

from common.errors import BadMessage, PeerLost
from services.sandbox.grading.attempt import (
    RETRIES,
    SEND_S,
    Attempt,
    BadTests,
    answering,
    ended,
)
from services.sandbox.isolation.jails import GRACE_S, SLOWEST, Jail
from services.sandbox.isolation.limits import MIB

TESTS_BYTES = 256 * MIB  # memory of the jail that holds tests in Python
WAITING_S = 10.0  # longest wait of solution and tests for each other, beside their own time


async def passed(attempt: Attempt, source: str, tests: str) -> list[bool]:
    """Which of the tests the solution passes, in the order of their source."""
    found: list[bool] = []
    count = 1
    async with attempt.slots.of(attempt.job):
        early = 0
        while len(found) < count and not attempt.over(found):
            pair = await _pair(attempt, source, tests)
            try:
                count = await _collected(attempt, pair[1])
                if not count:  # the solution does not load
                    await _both_ended(pair)
                    break
                while len(found) < count and not attempt.over(found):
                    verdict = await _test(attempt, pair, len(found))
                    over = verdict is None or verdict.get("lost") is True
                    if over and not await _both_ended(pair) and early < RETRIES:
                        early += 1
                        break
                    found.append(verdict is not None and verdict.get("passed") is True)
                    if over:
                        attempt.late += 1
                        break
            finally:
                for jail in pair:
                    jail.close()
    count = max(count, 1)
    return found[:count] + [False] * (count - len(found))


async def _pair(attempt: Attempt, source: str, tests: str) -> tuple[Jail, Jail]:
    """The solution's jail, and that of its tests, which speak through a socket pair."""
    one, other = socket.socketpair()
    solution: Jail | None = None
    try:
        program = {"mode": "objects", "source": source}
        # By the clock each also waits for the other; CPU time counts as ever.
        limits = replace(attempt.limits, wall_s=SLOWEST * attempt.limits.wall_s + WAITING_S)
        solution = await attempt.launcher.open(program, limits, peer=one.fileno())
        program = {"mode": "tests", "source": tests}
        limits = limits.capped(memory_bytes=TESTS_BYTES)
        return solution, await attempt.launcher.open(
            program, limits, cells=True, peer=other.fileno()
        )
    except BaseException:
        if solution is not None:
            solution.close()
        raise
    finally:
        one.close()
        other.close()


async def _collected(attempt: Attempt, jail: Jail) -> int:
    """How many tests there are; 0 if the solution does not load."""
    said = await _said(attempt, jail)
    if said is None:
        return 0
    if "broken" in said:
        raise BadTests(str(said["broken"]))
    if said.get("ready") is True and not said["tests"]:
        raise BadTests("there is no function test_*")
    return len(said["tests"])


async def _test(attempt: Attempt, pair: tuple[Jail, Jail], number: int) -> dict[str, Any] | None:
    for jail in pair:
        jail.lap()
        jail.output.left = attempt.limits.output_bytes
    cells = pair[1].cells
    assert cells is not None
    try:
        await cells.send(attempt.clock, {"test": number}, SEND_S)
    except PeerLost:
        return None
    verdict = await _said(attempt, pair[1])
    return verdict if verdict is not None and verdict.get("test") == number else None


async def _said(attempt: Attempt, jail: Jail) -> dict[str, Any] | None:
    """The next word of a jail with tests; None if it has ended. Only words that carry the
    nonce count.
    """
    assert jail.cells is not None
    patience = SLOWEST * attempt.limits.wall_s + WAITING_S + GRACE_S
    try:
        with answering():
            frame: dict[str, Any] = await jail.cells.receive(attempt.clock, patience)
    except (PeerLost, BadMessage):
        return None
    return frame if frame.get("nonce") == jail.nonce else None


async def _both_ended(pair: tuple[Jail, Jail]) -> bool:
    """Both had begun; see `ended`."""
    begun = [await ended(jail) for jail in pair]
    return all(begun)
