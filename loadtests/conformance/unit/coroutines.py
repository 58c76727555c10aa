"""Coroutines: tests that await, asynchronous generators and contexts, time-outs."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "async_gather",
        """
import asyncio


async def fetch_all(fetch, keys, limit=2):
    slots = asyncio.Semaphore(limit)

    async def one(key):
        async with slots:
            try:
                return await fetch(key)
            except LookupError:
                return None

    return await asyncio.gather(*(one(key) for key in keys))
""",
        """
import asyncio

import pytest
from solution import fetch_all


@pytest.mark.asyncio
async def test_order_and_limit():
    running, most = 0, 0

    async def fetch(key):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return key * 2

    assert await fetch_all(fetch, [1, 2, 3, 4]) == [2, 4, 6, 8]
    assert most == 2


@pytest.mark.asyncio
async def test_missing():
    async def fetch(key):
        if key == "b":
            raise KeyError(key)
        return key

    assert await fetch_all(fetch, "abc") == ["a", None, "c"]
    assert await fetch_all(fetch, []) == []
""",
        ("except LookupError", "except IndexError"),
        ("asyncio.Semaphore(limit)", "asyncio.Semaphore(limit + 1)"),
    ),
    unit(
        "async_generator",
        """
async def pages(fetch, start=1):
    number = start
    while True:
        items = await fetch(number)
        if not items:
            return
        for item in items:
            yield item
        number += 1


async def first(source, default=None):
    async for item in source:
        return item
    return default
""",
        """
import pytest
from solution import first, pages

DATA = {1: ["a", "b"], 2: ["c"], 3: []}


async def fetch(number):
    return DATA[number]


@pytest.mark.asyncio
async def test_all():
    assert [item async for item in pages(fetch)] == ["a", "b", "c"]
    assert [item async for item in pages(fetch, start=2)] == ["c"]


@pytest.mark.asyncio
async def test_first():
    assert await first(pages(fetch)) == "a"
    assert await first(pages(fetch, 3)) is None
    assert await first(pages(fetch, 3), default=0) == 0
""",
        ("        number += 1\n", "        number += len(items)\n"),
        ("    return default", "    return default or None"),
    ),
    unit(
        "async_context",
        """
class Connection:
    def __init__(self, log):
        self.log = log
        self.open = False

    async def __aenter__(self):
        self.open = True
        self.log.append("open")
        return self

    async def __aexit__(self, kind, error, trace):
        self.open = False
        self.log.append("rollback" if kind else "commit")
        return False

    async def run(self, text):
        if not self.open:
            raise RuntimeError("not open")
        self.log.append(text)
""",
        """
import asyncio

import pytest
from solution import Connection


def test_commit():
    log = []

    async def main():
        async with Connection(log) as connection:
            await connection.run("insert")
        return connection.open

    assert asyncio.run(main()) is False
    assert log == ["open", "insert", "commit"]


def test_rollback():
    log = []

    async def main():
        async with Connection(log):
            raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert log == ["open", "rollback"]


def test_closed():
    with pytest.raises(RuntimeError, match="not open"):
        asyncio.run(Connection([]).run("x"))
""",
        ("        return False\n", "        return True\n"),
        ("        self.open = False\n        self.log.append(", "        self.log.append("),
    ),
    unit(
        "async_timeout",
        """
import asyncio


async def within(awaitable, seconds, default=None):
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except asyncio.TimeoutError:
        return default


async def first_done(*makers):
    tasks = [asyncio.ensure_future(maker()) for maker in makers]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    return next(task.result() for task in tasks if task in done)
""",
        """
import asyncio
import unittest

from solution import first_done, within


async def forever():
    await asyncio.Event().wait()


class TestTimes(unittest.IsolatedAsyncioTestCase):
    async def test_in_time(self):
        async def quick():
            return 0

        self.assertEqual(await within(quick(), 30, default=9), 0)

    async def test_late(self):
        self.assertEqual(await within(forever(), 0.01, default="late"), "late")
        self.assertIsNone(await within(forever(), 0.01))

    async def test_first(self):
        cancelled = []

        async def slow():
            try:
                await forever()
            except asyncio.CancelledError:
                cancelled.append("slow")
                raise

        async def quick():
            await asyncio.sleep(0)
            return "quick"

        self.assertEqual(await first_done(slow, quick), "quick")
        self.assertEqual(cancelled, ["slow"])

    async def test_errors_pass(self):
        async def bad():
            raise ValueError("bad")

        with self.assertRaises(ValueError):
            await within(bad(), 30)
""",
        (
            "        task.cancel()\n",
            "        task.done()\n",
            "    await asyncio.gather(*rest, return_exceptions=True)\n",
            "",
        ),
        ("except asyncio.TimeoutError", "except Exception"),
    ),
    unit(
        "async_queue_workers",
        """
import asyncio


async def process(items, work, workers=3):
    queue, results, failed = asyncio.Queue(), {}, {}
    for number, item in enumerate(items):
        queue.put_nowait((number, item))

    async def worker():
        while not queue.empty():
            number, item = queue.get_nowait()
            try:
                results[number] = await work(item)
            except Exception as error:
                failed[item] = error

    await asyncio.gather(*(worker() for _ in range(workers)))
    return [results[number] for number in sorted(results)], failed
""",
        """
import asyncio

import pytest
from solution import process


@pytest.fixture
def work():
    async def run(item):
        for _ in range(20 * (3 - item % 3)):
            await asyncio.sleep(0)
        if item < 0:
            raise ValueError(item)
        return item * item

    return run


@pytest.mark.asyncio
async def test_in_order(work):
    done, failed = await process([3, 1, 2, 5], work)
    assert done == [9, 1, 4, 25]
    assert failed == {}


@pytest.mark.asyncio
@pytest.mark.parametrize("workers", [1, 2])
async def test_failures(work, workers):
    done, failed = await process([1, -2, 3], work, workers=workers)
    assert done == [1, 9]
    assert list(failed) == [-2]
    assert isinstance(failed[-2], ValueError)


@pytest.mark.asyncio
async def test_nothing(work):
    assert await process([], work) == ([], {})
""",
        ("for number in sorted(results)]", "for number in results]"),
        ("failed[item] = error", "failed[item] = str(error)"),
    ),
    unit(
        "async_fixture_bus",
        """
class Bus:
    def __init__(self):
        self._topics = {}

    def subscribe(self, topic, handler):
        self._topics.setdefault(topic, []).append(handler)

    async def publish(self, topic, message):
        count = 0
        for name, handlers in self._topics.items():
            if name == topic or (name.endswith("*") and topic.startswith(name[:-1])):
                for handler in handlers:
                    await handler(topic, message)
                    count += 1
        return count
""",
        """
import asyncio

import pytest
from solution import Bus


@pytest.fixture
def bus_and_log():
    bus, log = Bus(), []

    async def keep(topic, message):
        await asyncio.sleep(0)
        log.append((topic, message))

    bus.subscribe("a.b", keep)
    bus.subscribe("a.*", keep)
    return bus, log


@pytest.mark.asyncio
async def test_both(bus_and_log):
    bus, log = bus_and_log
    assert await bus.publish("a.b", 1) == 2
    assert log == [("a.b", 1)] * 2


@pytest.mark.asyncio
async def test_pattern(bus_and_log):
    bus, log = bus_and_log
    assert await bus.publish("a.c", {"x": 1}) == 1
    assert await bus.publish("b.a", 0) == 0
    assert await bus.publish("a", 0) == 0
    assert log == [("a.c", {"x": 1})]
""",
        ("topic.startswith(name[:-1])", "topic.startswith(name[:-2])"),
        ("await handler(topic, message)", "await handler(name, message)"),
    ),
]
