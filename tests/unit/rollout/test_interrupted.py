"""Wherever a turn, a group or an evaluation is cut off, and whatever call fails, nothing stays
behind: no seat, no place in the queue, no request, buffer, session or wait. The shard goes on at
full width.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from meshrl.common.base.errors import (
    DeadlineExceeded,
    MeshError,
    Overloaded,
    PeerLost,
    StateUnavailable,
)
from meshrl.common.base.random import Random
from meshrl.common.job.evaluation_plan import EvaluationPlan
from meshrl.services.rollout.evaluation import EvaluationRun
from meshrl.services.rollout.trajectories.trajectory import Trajectory, Turn
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.stories import story_on
from tests.unit.common.generation.test_torch_engine import words
from tests.unit.rollout.interrupted import Interruption
from tests.unit.rollout.routing.test_router import LOOK_S, PROMPT, TwoBuckets
from tests.unit.rollout.shard_bench import ENGINES, SLOTS, ShardBench, on_shard

PLAN = EvaluationPlan("step-0", 0, ("sampled", "greedy"))


# -- a turn --------------------------------------------------------------------------------------


async def two_turns(bench: TwoBuckets, t: Trajectory) -> None:
    """A turn at one engine and, after a tool's failure, one at the other, with its cache."""
    router = bench.router
    async with router.create_assignment(t) as stay:
        await stay.generate(PROMPT + 30)
        t.open_turn = Turn("", 30, "run", None, "error: no", has_tool_value=True)
        router.on_tool_return(stay)
        t.append([4, 5])
        await stay.generate(PROMPT + 52)


def left(bench: TwoBuckets) -> dict[str, Any]:
    router = bench.router
    found = {
        "stays": list(router.assignments),
        "queue": router.queue_length,
        "waits": bench.rollout.waits.list_longest([]),
        "held": [stay.trajectory.id for link in router.links.values() for stay in link.assignments],
        "out": [
            stay.trajectory.id
            for link in router.links.values()
            for stay in link.running_assignments
        ],
        "requests": router._group_commit._staging.open_count,
        "moves": [one for one in asyncio.all_tasks() if one.get_name() == "cache move"],
        "running": sum(service.engine.num_running for service in bench.engines.values()),
    }
    return {what: held for what, held in found.items() if held}


@pytest.mark.parametrize("crowd, awaits", [(0, 2), (2 * SLOTS, 3)], ids=["moves", "queues"])
@story_on(partial(run_virtual, limit_s=36000.0), given=2)
async def test_a_turn_that_is_cancelled_at_any_await_leaves_nothing(
    clock: VirtualClock, random: Random, crowd: int, awaits: int
) -> None:
    bench = TwoBuckets(clock, random)
    await bench.start()
    await bench.add("engine/g1")
    await clock.sleep(2 * LOOK_S)
    at = 0
    while True:
        at += 1
        interruption = Interruption(at)
        others = [bench.begin(100 * at + n) for n in range(crowd)]
        await asyncio.sleep(0)
        t = Trajectory(at, 1, 0, 0, seed=1)
        t.set_prompt(words(1, PROMPT))
        turn = asyncio.create_task(interruption.watch(two_turns(bench, t)))
        interruption.task = turn
        await asyncio.sleep(0)
        assert bench.router.queue_length == bool(crowd)
        await asyncio.gather(turn, return_exceptions=True)
        await asyncio.gather(*others)
        await clock.sleep(3.0)
        assert left(bench) == {}, f"cancelled at await {at}"
        assert bench.router.free_requests == ENGINES * SLOTS
        if not interruption.happened:
            break
    assert interruption.awaits >= awaits and t.length == PROMPT + 52
    assert crowd or bench.router.cache_actions["move"] > 1, "it was cancelled while its cache came"


# -- groups and evaluations ----------------------------------------------------------------------


@pytest.mark.rotating(2)
@story_on(on_shard, "tmp_path")
async def test_a_group_that_is_cancelled_at_any_await_leaves_nothing(bench: ShardBench) -> None:
    at = 0
    while True:
        at += 1
        interruption = bench.job.runner.interruption = Interruption(at)
        group = await bench.group()
        interruption.task = group
        await asyncio.gather(group, return_exceptions=True)
        await bench.settled()
        assert bench.left() == {}, f"cancelled at await {at}"
        if not interruption.happened:
            break
    assert at > 20 and bench.job.groups_finished >= 1
    await at_full_width(bench)


@pytest.mark.deep
@story_on(on_shard, "tmp_path")
async def test_an_evaluation_cancelled_at_any_await_leaves_nothing(bench: ShardBench) -> None:
    at = 0
    while True:
        at += 1
        interruption = bench.job.runner.interruption = Interruption(at)
        work = interruption.watch(EvaluationRun(bench.job, PLAN, at).run())
        task = asyncio.create_task(work)
        interruption.task = task
        results = await asyncio.gather(task, return_exceptions=True)
        await bench.settled()
        assert bench.left() == {}, f"cancelled at await {at}"
        if not interruption.happened:
            break
    assert at > 20 and not isinstance(results[0], BaseException)
    assert results[0]["failed"] == 0
    await at_full_width(bench)


async def at_full_width(bench: ShardBench) -> None:
    """All engines are full again, and what fills them ends."""
    bench.job.runner.interruption = Interruption()
    many = [await bench.group() for _ in range(2 * ENGINES * SLOTS)]
    widest = 0
    while not all(group.done() for group in many):
        await bench.clock.sleep(0.02)
        running = sum(service.engine.num_running for service in bench.engines)
        widest = max(widest, running)
    assert widest == ENGINES * SLOTS
    await bench.settled()
    assert bench.left() == {}


ERRORS = [PeerLost, DeadlineExceeded, Overloaded]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("error", ERRORS)
@story_on(on_shard, "tmp_path")
async def test_each_call_of_a_group_may_fail(bench: ShardBench, error: type[MeshError]) -> None:
    failed: set[str] = set()
    for at in range(1, 100):
        bench.calls.arm(at, lambda: error("it was made to"))
        await (await bench.group())
        result = await EvaluationRun(bench.job, PLAN, at).run()
        await bench.settled()
        assert bench.left() == {}, bench.calls.asked
        assert result["problems"] == 3 and result["mixed"] == 0
        if len(bench.calls.asked) < at:
            break
        failed.add(bench.calls.asked[at - 1].split()[0])
    assert {"submit", "run_tools", "score_trajectories"} <= failed, failed
    assert bench.job.groups_finished == at
    await at_full_width(bench)


@story_on(on_shard, "tmp_path")
async def test_redis_may_fail_each_script_of_a_group_and_an_evaluation(bench: ShardBench) -> None:
    async def both(number: int) -> list[str]:
        await (await bench.group())
        await EvaluationRun(bench.job, PLAN, number).run()
        await bench.settled()
        assert bench.left() == {}, bench.scripts.asked
        return bench.scripts.asked

    bench.scripts.arm(0, None)
    names = dict.fromkeys(await both(0))
    assert {"group_ready", "evaluation", "entries"} <= names.keys()
    for number, name in enumerate(names, 1):
        bench.scripts.arm(1, lambda: StateUnavailable("it was made to"), name)
        asked = await both(number)
        assert asked.count(name) > 1, f"{name} was not asked again"
    await at_full_width(bench)
