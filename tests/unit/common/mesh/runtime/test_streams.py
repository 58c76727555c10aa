"""Streams over real sockets: order, credits, closing, loss."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from meshrl.common.base.errors import DeadlineExceeded, PeerLost
from tests.unit.common.mesh.runtime.talking import Join, Number, Talk, Talker, Text, until


async def test_items_come_in_order_to_the_end(join: Join) -> None:
    await join("a", Talker())
    items = (await join("b")).ref("a").stream(Talk.numbers, Number(200))
    assert [item.value async for item in items] == list(range(200))


async def test_the_producer_stays_within_its_credits(join: Join) -> None:
    actor = Talker()
    await join("a", actor)
    async with aclosing((await join("b")).ref("a").stream(Talk.numbers, Number(1000))) as items:
        assert await anext(items) == Number(0)
        await asyncio.sleep(0.1)
        assert actor.produced <= 1 + 2 * Talk.numbers.credits


@pytest.mark.parametrize("how", ["break", "aclose", "cancel"])
async def test_a_consumer_that_ends_closes_the_producer(join: Join, how: str) -> None:
    actor = Talker()
    await join("a", actor)
    items = (await join("b")).ref("a").stream(Talk.numbers, Number(10_000))

    async def consume() -> None:
        nonlocal items
        async for item in items:
            if item.value == 3 and how != "cancel":
                break
            if item.value == 3:
                await asyncio.sleep(30)

    task = asyncio.create_task(consume())
    await until(lambda: actor.produced >= 4)
    if how == "cancel":
        task.cancel()
    await asyncio.wait([task])
    if how == "aclose":
        await items.aclose()
    del items, task, consume
    await until(actor.closed.is_set)


async def test_silence_beyond_idle_s_ends_both_sides(join: Join) -> None:
    actor = Talker()
    await join("a", actor)
    ref = (await join("b")).ref("a")
    await ref.call(Talk.echo, Text(""))  # a connection is there, so that the producer begins
    with pytest.raises(DeadlineExceeded, match=r"Talk\.silent"):
        async for _ in ref.stream(Talk.silent, Number(1)):
            pass
    await until(actor.closed.is_set)


async def test_a_lost_peer_ends_the_stream_with_an_error(join: Join) -> None:
    producer = await join("a", Talker())
    got = []
    with pytest.raises(PeerLost, match="a has gone"):
        async for item in (await join("b")).ref("a").stream(Talk.numbers, Number(100_000)):
            got.append(item.value)
            if item.value == 5:
                await producer.leave()
    assert got == list(range(len(got)))


async def test_a_lost_consumer_closes_the_producer(join: Join) -> None:
    actor = Talker()
    await join("a", actor)
    consumer = await join("b")
    items = consumer.ref("a").stream(Talk.numbers, Number(100_000))
    await anext(items)
    await consumer.leave()
    await until(actor.closed.is_set)
