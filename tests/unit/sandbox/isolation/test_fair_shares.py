"""No job starves another: slots go to the job that has fewest, and none may hold all of them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import SystemClock
from services.sandbox.isolation.fair_shares import chosen, most_of_one
from services.sandbox.isolation.slots import JailSlots


@given(st.integers(1, 64), st.integers(1, 8))
def test_one_job_leaves_room_unless_it_is_alone(slots: int, jobs: int) -> None:
    most = most_of_one(slots, jobs)
    assert 1 <= most <= slots
    assert most == slots if jobs == 1 or slots == 1 else most < slots


@given(
    st.lists(st.sampled_from("abcd"), unique=True),
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 6)),
    st.integers(1, 16),
)
def test_who_is_chosen_waits_has_least_and_there_is_room(
    waiting: list[str], running: dict[str, int], slots: int
) -> None:
    jobs = max(len(set(waiting) | set(running)), 1)
    found = chosen(waiting, running, slots, jobs)
    most = most_of_one(slots, jobs)
    allowed = [job for job in waiting if running.get(job, 0) < most]
    if sum(running.values()) >= slots or not allowed:
        assert found == ""
    else:
        assert found in allowed
        assert all(running.get(found, 0) <= running.get(job, 0) for job in allowed)


async def test_a_job_that_holds_its_slots_for_ever_does_not_hold_up_another() -> None:
    slots = JailSlots(SystemClock(), 4)
    slots.jobs = 2
    for _ in range(3):
        await slots.take("bomb")
    stuck = asyncio.create_task(slots.take("bomb"))
    for _ in range(100):
        async with asyncio.timeout(5), slots.of("good"):
            pass
    assert not stuck.done() and slots.busy == 3
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
    assert slots.waiting == 0


async def test_jobs_take_turns() -> None:
    slots, order = JailSlots(SystemClock(), 1), []

    async def call(job: str) -> None:
        async with slots.of(job):
            order.append(job)

    await slots.take("first")
    calls = [asyncio.create_task(call(job)) for job in "aaaaaabbb"]
    await asyncio.sleep(0)
    slots.release("first")
    await asyncio.gather(*calls)
    assert order == list("abababaaa")


@pytest.mark.parametrize("when", ["waiting", "given"])
async def test_a_caller_that_leaves_gives_its_slot_back(when: str) -> None:
    slots = JailSlots(SystemClock(), 1)
    await slots.take("a")
    leaving = asyncio.create_task(slots.take("b"))
    await asyncio.sleep(0)
    if when == "given":
        slots.release("a")
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    if when == "waiting":
        slots.release("a")
    async with asyncio.timeout(5):
        await slots.take("c")
    assert Counter({"c": 1}) == slots._running
