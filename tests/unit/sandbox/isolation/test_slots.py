"""Calls get slots in the order in which they came, and give them back whatever becomes of them."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import Overloaded
from meshrl.services.sandbox.isolation.resources import slots as module
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from tests.load import scaled


async def test_who_comes_first_is_served_first_and_no_more_run_than_there_are() -> None:
    slots, order = JailSlots(SystemClock(), 2), []

    async def call(number: int) -> None:
        async with slots.acquire():
            assert slots.busy <= 2
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(call(number) for number in range(9)))
    assert order == list(range(9)) and (slots.busy, slots.waiting) == (0, 0)


@pytest.mark.parametrize("when", ["waiting", "given"])
async def test_a_caller_that_leaves_gives_its_slot_back(when: str) -> None:
    slots = JailSlots(SystemClock(), 1)

    async def call() -> None:
        async with slots.acquire():
            await asyncio.sleep(0)

    async with slots.acquire():
        leaving = asyncio.create_task(call())
        await asyncio.sleep(0)
        if when == "waiting":
            leaving.cancel()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    async with asyncio.timeout(scaled(5)), slots.acquire():
        assert (slots.busy, slots.waiting) == (1, 0)


@pytest.mark.deep
async def test_more_than_can_be_served_in_time_are_refused() -> None:
    slots = JailSlots(SystemClock(), 0)

    async def call() -> None:
        async with slots.acquire():
            raise AssertionError("there is no slot")

    waiting = [asyncio.create_task(call()) for _ in range(module.MAX_WAITING_CALLS)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="wait for a jail already"):
        await call()
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
