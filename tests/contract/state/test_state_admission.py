"""What the gateway asks of the launcher, and the marks of hosts, the same on every backend."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import DeadlineExceeded, Refused
from meshrl.common.state.hosts import admission
from meshrl.common.state.pool.placing.snapshot import NOTICE, PoolRequest
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.redis.client import State
from tests.contract.state.state_bench import Bench

ABOUT = {"host": "gpu1-1f3a9c", "nested": {"roles": ["node"]}}


async def test_a_question_is_answered_once_whoever_asks_again(state: State) -> None:
    clock = SystemClock()
    asking = asyncio.create_task(admission.ask(state, clock, "q1", admission.JOIN, ABOUT))
    while not (found := await admission.asked(state)):
        await asyncio.sleep(0.01)
    [one] = found
    assert (one.id, one.kind, one.about) == ("q1", "join", ABOUT)
    await admission.answer(state, "q1", {"prefix": "h1w", "settings": {}})
    assert await asking == {"prefix": "h1w", "settings": {}}
    assert await admission.asked(state) == []
    again = await admission.ask(state, clock, "q1", admission.JOIN, ABOUT)
    assert again["prefix"] == "h1w" and await admission.asked(state) == []


async def test_what_was_asked_is_told_in_that_order(bench: Bench) -> None:
    ids = [f"q{7 * i % 30}" for i in range(30)]  # a hash tells them in an order of its own
    for id in ids:
        with pytest.raises(DeadlineExceeded):
            await admission.ask(bench.state, SystemClock(), id, admission.BACK, ABOUT, -1.0)
        await bench.pass_ms(2)
    assert [one.id for one in await admission.asked(bench.state)] == ids


async def test_a_refusal_comes_back_as_its_error(state: State) -> None:
    await admission.answer(state, "q2", Refused("a host called x is in the mesh", fix="Join anew"))
    with pytest.raises(Refused, match=r"a host called x is in the mesh.*Join anew"):
        await admission.ask(state, SystemClock(), "q2", admission.JOIN, ABOUT)


async def test_who_asks_in_vain_gives_up_and_is_forgotten(bench: Bench) -> None:
    with pytest.raises(DeadlineExceeded, match=r"launcher.*log"):
        await admission.ask(bench.state, SystemClock(), "q3", admission.LEAVE, ABOUT, 0.0)
    assert [one.id for one in await admission.asked(bench.state)] == ["q3"]
    if bench.clock is None:  # a real server's clock is nobody's to move
        return
    bench.clock.now += admission.WAITS_S + 1
    assert await admission.asked(bench.state) == []


async def test_a_host_is_marked_and_used_again(state: State) -> None:
    await pool.request(state, PoolRequest("op", "drain", host="a"))
    assert await pool.draining(state) == {"a": "asked for"}
    assert await pool.mark_host(state, "b", "has left")
    assert not await pool.mark_host(state, "b", "has left")
    assert await pool.draining(state) == {"a": "asked for", "b": "has left"}
    assert await pool.mark_host(state, "a", "")
    assert await pool.draining(state) == {"b": "has left"}
    assert await state.command("HGETALL", "{mesh}:requests") in ({}, [])
    assert not await pool.mark_host(state, "b", "", was=NOTICE), "that was said for another reason"
    assert await pool.mark_host(state, "a", NOTICE, was="")
    assert not await pool.mark_host(state, "b", NOTICE, was="")
    assert await pool.draining(state) == {"a": NOTICE, "b": "has left"}
    assert await pool.mark_host(state, "a", "", was=NOTICE)
    assert await pool.draining(state) == {"b": "has left"}
