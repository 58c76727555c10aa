"""Tests that call a function with JSON values: what it returns is compared outside of its jail."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from typing import Any

from common.errors import BadMessage, PeerLost
from services.sandbox.grading.attempt import RETRIES, SEND_S, Attempt, answering, ended
from services.sandbox.isolation.jails import GRACE_S, SLOWEST, Jail


async def passed(attempt: Attempt, source: str, function: str, cases: list[Any]) -> list[bool]:
    """Which of the cases the function passes. One jail serves all calls, and another goes on after
    the one in which it ended.
    """
    found: list[bool] = []
    program = {"mode": "calls", "source": source, "function": function}
    async with attempt.slots.of(attempt.job):
        early = 0  # jails that ended before they were asked
        while len(found) < len(cases) and not attempt.over(found):
            jail = await attempt.launcher.open(program, attempt.limits, cells=True)
            try:
                if await _answer(attempt, jail, {}) is None:  # it does not even load
                    await ended(jail)
                    break
                while len(found) < len(cases) and not attempt.over(found):
                    answer = await _answer(attempt, jail, cases[len(found)])
                    if answer is None and not await ended(jail) and early < RETRIES:
                        early += 1
                        break  # another jail is asked
                    found.append(_right(answer, cases[len(found)]))
                    if answer is None:
                        attempt.late += 1
                        break
            finally:
                jail.close()
    return found + [False] * (len(cases) - len(found))


async def _answer(attempt: Attempt, jail: Jail, case: dict[str, Any]) -> dict[str, Any] | None:
    """What the guest says to a call, or to nothing at its start; None if it has ended."""
    assert jail.cells is not None
    token = secrets.token_hex(8)
    with contextlib.suppress(PeerLost, BadMessage), answering():
        if case:
            jail.lap()
            jail.output.left = attempt.limits.output_bytes
            asked = {"call": token, "args": case["args"], "kwargs": case.get("kwargs", {})}
            await jail.cells.send(attempt.clock, asked, SEND_S)
        patience = SLOWEST * attempt.limits.wall_s + GRACE_S
        waited = asyncio.ensure_future(jail.cells.receive(attempt.clock, patience))
        try:
            await asyncio.wait({waited, jail.output.over}, return_when="FIRST_COMPLETED")
            if waited.done():
                found: dict[str, Any] = waited.result()
                return found if not case or found.get("call") == token else None
        finally:
            waited.cancel()
            await asyncio.gather(waited, return_exceptions=True)
    return None


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
