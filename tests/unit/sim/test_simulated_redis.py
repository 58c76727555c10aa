"""Simulated Redis that is unreachable, slow, full or emptied, and the reactions of StateClient."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import DataError

from meshrl.common.base.errors import StateUnavailable
from meshrl.common.base.random import Random
from meshrl.common.state import events, leader
from meshrl.common.state.redis.client import (
    RENEWAL_TIMEOUT_S,
    RETRIES,
    SOCKET_TIMEOUT_S,
    StateClient,
)
from meshrl.sim.redis.server import FullResource, NotSimulated, SimulatedRedisServer
from meshrl.sim.redis.simulated_state import open_simulated_state, open_state_on
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.contract.state.state_bench import HandClock
from tests.simulated_host import staged

TTL_MS = 600_000
ORDERS = """
from meshrl.sim.redis.server import SimulatedRedisServer
class Still:
    def wall(self): return 1.0
    monotonic = wall
server = SimulatedRedisServer(Still())
server.execute(("HSET", "h", *[word for n in range(40) for word in (f"field{n * n}", str(n))]))
print(server.execute(("HGETALL", "h")))
print(server.execute(("EVAL", "return cjson.encode(cjson.decode(ARGV[1]))", "0",
    "{" + ",".join(f'"name{n * n}":{n}' for n in range(40)) + "}")))
"""


class Scene:
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.server = SimulatedRedisServer(clock)
        self.faults = self.server.faults
        self.state = open_state_on(self.server, StateClient, clock)
        self.token = 0

    async def begin(self) -> None:
        self.token = await leader.campaign(self.state, "planner", "me", TTL_MS)

    def renew_lease(self) -> bool:
        """Renew a lease as the lease thread does."""
        return leader.renew_leadership(self.state, "planner", self.token, TTL_MS)

    async def list_event_kinds(self) -> list[str]:
        return [event.kind for event in await events.read_all(self.state)]

    async def run_after(self, seconds: float, change: Callable[[], None]) -> None:
        await self.clock.sleep(seconds)
        change()


def in_scene(play: Callable[[Scene], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        scene = Scene(clock)
        await scene.begin()
        await play(scene)

    run_virtual(main)


@staged(in_scene)
async def test_unreachable_server_returns_with_its_data(
    scene: Scene,
) -> None:
    scene.faults.is_unreachable = True
    started_s = scene.clock.monotonic()
    with pytest.raises(StateUnavailable, match="does not answer"):
        await events.append(scene.state, "refused", {})
    assert 1 < scene.clock.monotonic() - started_s < 3  # retried, as redis-py does
    with pytest.raises(StateUnavailable):
        scene.renew_lease()
    await scene.clock.sleep(4)
    assert scene.state.get_outage_ms() >= 4000
    scene.faults.is_unreachable = False
    assert scene.renew_lease()
    assert scene.state.get_outage_ms() == 0
    assert await scene.list_event_kinds() == ["leader"]


@staged(in_scene)
async def test_outage_shorter_than_the_clients_retries_is_hidden(
    scene: Scene,
) -> None:
    scene.faults.is_unreachable = True

    def restore_server() -> None:
        scene.faults.is_unreachable = False

    waiting = asyncio.create_task(scene.run_after(0.7, restore_server))
    await events.append(scene.state, "late", {})
    await waiting
    assert await scene.list_event_kinds() == ["leader", "late"]


@staged(in_scene)
async def test_command_with_a_lost_reply_is_sent_again(scene: Scene) -> None:
    scene.faults.lost_replies = 1
    await scene.state.run_command("INCR", "count")
    assert await scene.state.run_command("GET", "count") == "2"
    started_s = scene.clock.monotonic()
    scene.faults.lost_replies = 2
    await events.append(scene.state, "once", {})  # with one operation id, however often it is sent
    assert scene.clock.monotonic() - started_s > 2 * SOCKET_TIMEOUT_S
    assert await scene.list_event_kinds() == ["leader", "once"]
    scene.faults.lost_replies = 1
    assert scene.renew_lease()


@staged(in_scene)
async def test_permanently_lost_replies_raise_an_error(scene: Scene) -> None:
    scene.faults.lost_replies = RETRIES + 1
    with pytest.raises(StateUnavailable):
        await events.append(scene.state, "unheard", {})
    scene.faults.lost_replies = 0
    assert await scene.list_event_kinds() == ["leader", "unheard"]


@staged(in_scene)
async def test_slow_server_answers_late_or_times_out(scene: Scene) -> None:
    started_s = scene.clock.monotonic()
    scene.faults.delay_s = 0.25
    await events.append(scene.state, "late", {})
    assert scene.clock.monotonic() - started_s == pytest.approx(0.25)
    scene.faults.delay_s = RENEWAL_TIMEOUT_S + 1
    await scene.list_event_kinds()  # the event loop's client has a longer timeout than the thread's
    with pytest.raises(StateUnavailable):
        scene.renew_lease()
    scene.faults.delay_s = SOCKET_TIMEOUT_S + 1
    with pytest.raises(StateUnavailable):
        await scene.list_event_kinds()


@pytest.mark.parametrize("full", [FullResource.MEMORY, FullResource.DISK])
@staged(in_scene)
async def test_full_server_rejects_writes_and_serves_reads(
    scene: Scene, full: FullResource
) -> None:
    scene.faults.full_resource = full
    with pytest.raises(StateUnavailable, match="rejects writes"):
        await events.append(scene.state, "refused", {})
    with pytest.raises(StateUnavailable, match="rejects writes"):
        scene.renew_lease()
    assert await leader.read_leader(scene.state, "planner") == ("me", scene.token)
    scene.faults.full_resource = FullResource.NO
    await events.append(scene.state, "after", {})
    assert await scene.list_event_kinds() == ["leader", "after"]


@staged(in_scene)
async def test_server_that_lost_its_state_continues_empty(scene: Scene) -> None:
    await scene.clock.sleep(1)
    scene.server.lose_state()
    assert await scene.list_event_kinds() == []
    assert not scene.renew_lease()
    assert await leader.campaign(scene.state, "planner", "you", TTL_MS) > scene.token


@staged(in_scene)
async def test_other_clients_run_between_a_command_and_its_reply(scene: Scene) -> None:
    order: list[str] = []

    async def increment_and_read(name: str) -> None:
        order.append(f"{name} {await scene.state.run_command('INCR', 'count')}")
        order.append(f"{name} {await scene.state.run_command('GET', 'count')}")

    await asyncio.gather(increment_and_read("a"), increment_and_read("b"))
    assert order == ["a 1", "b 2", "a 2", "b 2"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("RANDOMKEY",), "RANDOMKEY"),
        (("ZADD", "z", "GT", "1", "a"), "ZADD with GT"),
        (("SET", "k", "v", "EX", "1"), "SET with EX"),
        (("XADD", "s", "5-*", "f", "x"), "XADD with 5-*"),
        (("SCRIPT", "KILL"), "SCRIPT KILL"),
        (("EVAL", "return redis.call('SPOP', 's')", 0), "SPOP"),
        (("EVAL", "return redis.sha1hex('x')", 0), "redis.sha1hex"),
        (("EVAL", "return redis.call('XREAD', 's')", 0), "XREAD"),
        (("INCR", "great"), "2\\^53"),
    ],
)
async def test_unsupported_command_is_named(words: tuple[Any, ...], named: str) -> None:
    state = open_simulated_state(HandClock())
    await state.run_command("SET", "great", str(2**53 - 1))
    with pytest.raises(NotSimulated, match=named):
        await state.run_command(*words)


async def test_arguments_have_the_types_that_redis_py_accepts() -> None:
    state = open_simulated_state(HandClock())
    await state.run_command("SET", "k", 0.1)
    assert await state.run_command("GET", b"k") == "0.1"
    for word in (True, None, ["x"]):
        with pytest.raises(DataError, match=type(word).__name__):
            await state.run_command("SET", "k", word)


async def test_expired_operation_ids_are_removed() -> None:
    clock = HandClock()
    server = SimulatedRedisServer(clock)
    for n in range(100):
        server.execute(("SET", f"op{n}", "x", "PX", "60000"))
        clock.now += 1
    # at most 60 s old: written at 40 s to 99 s
    assert server.execute(("EXISTS", *(f"op{n}" for n in range(100)))) == 60
    server.execute(("SET", "op99", "kept"))
    clock.now += 3600
    assert server.execute(("EXISTS", *(f"op{n}" for n in range(100)))) == 1


def test_threads_share_a_server_without_lost_updates() -> None:
    server = SimulatedRedisServer(HandClock())
    script = ("EVAL", "return redis.call('SET', 'n', redis.call('GET', 'n') + 1)", "0")
    server.execute(("SET", "n", "0"))

    def increment() -> None:
        for _ in range(500):
            server.execute(script)

    threads = [threading.Thread(target=increment) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.execute(("GET", "n")) == "2000"


def test_iteration_order_does_not_depend_on_the_hash_seed() -> None:
    def run_and_print(seed: str) -> bytes:
        return subprocess.run(
            [sys.executable, "-c", ORDERS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout

    assert run_and_print("1") == run_and_print("2") != b""
