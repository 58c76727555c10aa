"""Jail slots: granted in order of arrival, and always released."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import Overloaded
from meshrl.services.sandbox.isolation.resources import slots as module
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from tests.load import scaled


async def test_slots_are_granted_in_order_up_to_their_count() -> None:
    slots, order = JailSlots(SystemClock(), 2), []

    async def call(number: int) -> None:
        async with slots.acquire():
            assert slots.busy <= 2
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(call(number) for number in range(9)))
    assert order == list(range(9)) and (slots.busy, slots.waiting) == (0, 0)


@pytest.mark.parametrize("when", ["waiting", "given"])
async def test_cancelled_caller_releases_its_slot(when: str) -> None:
    slots = JailSlots(SystemClock(), 1)

    async def call() -> None:
        async with slots.acquire():
            await asyncio.sleep(0)

    async with slots.acquire():
        cancelled_call = asyncio.create_task(call())
        await asyncio.sleep(0)
        if when == "waiting":
            cancelled_call.cancel()
    cancelled_call.cancel()
    await asyncio.gather(cancelled_call, return_exceptions=True)
    async with asyncio.timeout(scaled(5)), slots.acquire():
        assert (slots.busy, slots.waiting) == (1, 0)


@pytest.mark.deep
async def test_calls_beyond_the_waiting_limit_are_rejected() -> None:
    slots = JailSlots(SystemClock(), 0)

    async def call() -> None:
        async with slots.acquire():
            raise AssertionError("there is no slot")

    waiting = [asyncio.create_task(call()) for _ in range(module.MAX_WAITING_CALLS)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="already wait for a jail"):
        await call()
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
