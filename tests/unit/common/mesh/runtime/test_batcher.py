"""Requests that are batched: what is given up, and what a close leaves behind."""

from __future__ import annotations

import asyncio

from meshrl.common.mesh.runtime.calls.batcher import Batcher


async def test_a_close_sends_nothing_more_and_leaves_no_future_pending() -> None:
    sent: list[list[int]] = []

    async def send(batch: list[int]) -> list[int | Exception]:
        sent.append(batch)
        await asyncio.sleep(60.0)
        return list(batch)

    batcher: Batcher[int, int] = Batcher(send, limit=2)
    futures = [batcher.put(number) for number in range(6)]
    await asyncio.sleep(0.01)
    await batcher.close()
    await asyncio.sleep(0.01)
    assert sent == [[0, 1]]
    assert all(future.cancelled() for future in futures)


async def test_a_close_before_a_batch_has_begun_leaves_no_future_pending() -> None:
    async def send(batch: list[int]) -> list[int | Exception]:
        return list(batch)

    batcher: Batcher[int, int] = Batcher(send)
    future = batcher.put(1)
    batcher._fire()
    await batcher.close()
    assert future.cancelled()


async def test_a_request_whose_future_is_cancelled_is_not_sent() -> None:
    sent: list[int] = []

    async def send(batch: list[int]) -> list[int | Exception]:
        sent.extend(batch)
        await asyncio.sleep(0.01)
        return list(batch)

    batcher: Batcher[int, int] = Batcher(send, limit=1)
    futures = [batcher.put(number) for number in range(3)]
    await asyncio.sleep(0)
    futures[1].cancel()
    assert (await futures[0], await futures[2]) == (0, 2)
    assert sent == [0, 2]
