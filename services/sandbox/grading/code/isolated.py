"""Tests in Python in a jail of their own, which uses the solution's objects across a pipe.

See `jail.objects` for what may be asked of the solution, and `jail.testing` for what runs the
tests. No code that the model wrote has ever been in the tests' jail.

The solution's wall clock runs while its tests wait for it: they say so once they have waited for
longer than a part of the case's limit, so most questions cost no word about whose turn it is.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

from common.base.errors import BadMessage, PeerLost
from common.grading.cases import BadTests
from common.grading.support import Unsupported
from services.sandbox.grading.code.attempt import SEND_S, Attempt, answering
from services.sandbox.isolation.jails.jail import GRACE_S, SLOWEST, Jail
from services.sandbox.isolation.resources.limits import MIB

TESTS_BYTES = 256 * MIB  # memory of the jail that holds tests in Python
WAITING_S = 10.0  # longest wait of the tests for their solution, beside their own time
UNTOLD = 0.25  # of a case's limit: waiting for the solution that its clock need not know of


async def passed(attempt: Attempt, source: str, tests: str) -> list[bool]:
    """Which of the tests the solution passes, in the order of their source."""
    found: list[bool] = []
    count = 1
    async with attempt.slots.one():
        while len(found) < count and not attempt.over(found):
            pair = await _pair(attempt, source, tests)
            try:
                count = await _collected(attempt, pair)
                if not count:
                    if await _blamed(attempt, pair):  # the solution does not load
                        break
                    count = 1
                    continue
                while len(found) < count and not attempt.over(found):
                    verdict = await _test(attempt, pair, len(found))
                    over = verdict is None or verdict.get("lost") is True
                    if over and not await _blamed(attempt, pair):
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
        program: dict[str, Any] = {"mode": "objects", "source": source}
        limits = attempt.limits
        solution = await attempt.launcher.open(program, limits, peer=one.fileno(), stands=True)
        program = {"mode": "tests", "source": tests, "patience_s": UNTOLD * limits.wall_s}
        program["files"] = attempt.launcher.tier != "landlock"  # there, /tmp is that of the host
        # By the clock the tests also wait for the solution; CPU time counts as ever.
        limits = replace(limits, wall_s=SLOWEST * limits.wall_s + WAITING_S)
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


async def _collected(attempt: Attempt, pair: tuple[Jail, Jail]) -> int:
    """How many tests there are; 0 if the solution does not load."""
    said = await _said(attempt, pair)
    if said is None:
        return 0
    if "broken" in said:
        raise BadTests(str(said["broken"]))
    if said.get("ready") is True and not said["tests"]:
        raise BadTests("there is no function test_*")
    return len(said["tests"])


async def _test(attempt: Attempt, pair: tuple[Jail, Jail], number: int) -> dict[str, Any] | None:
    for jail in pair:
        jail.lap(waits=jail is pair[0])
        jail.output.left = attempt.limits.output_bytes
    cells = pair[1].cells
    assert cells is not None
    try:
        await cells.send(attempt.clock, {"test": number}, SEND_S)
    except PeerLost:
        return None
    verdict = await _said(attempt, pair)
    return verdict if verdict is not None and verdict.get("test") == number else None


async def _said(attempt: Attempt, pair: tuple[Jail, Jail]) -> dict[str, Any] | None:
    """The next word of the tests; None if their jail has ended. Only words that carry the nonce
    count. Unsupported if they ask for what cannot be done.
    """
    solution, jail = pair
    assert jail.cells is not None
    patience = SLOWEST * attempt.limits.wall_s + WAITING_S + GRACE_S
    while True:
        try:
            with answering():
                frame: dict[str, Any] = await jail.cells.receive(attempt.clock, patience)
        except (PeerLost, BadMessage):
            return None
        if frame.get("nonce") != jail.nonce:
            return None
        if "unsupported" in frame:
            what = f"the runner isolated cannot run: {frame['unsupported']}"
            raise Unsupported(what, provoked=frame.get("provoked") is True)
        if "turn" not in frame:
            return frame
        solution.turn(frame["turn"] is True)


async def _blamed(attempt: Attempt, pair: tuple[Jail, Jail]) -> bool:
    """True if neither jail is to be replaced; see `Attempt.blames`."""
    blamed = [await attempt.blames(jail) for jail in pair]
    return all(blamed)
