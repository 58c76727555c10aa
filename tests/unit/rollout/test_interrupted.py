"""Interrupted turns, groups and evaluations release all resources.

A cancelled await or a failed call leaves no assignment, queue entry, request, buffer, session or
wait, and the shard continues at full width.
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
from tests.unit.common.generation.test_builtin_engine import words
from tests.unit.rollout.interrupted import Interruption
from tests.unit.rollout.routing.test_router import POLL_S, PROMPT, TwoBuckets
from tests.unit.rollout.shard_bench import ENGINES, SLOTS, ShardBench, run_on_shard

PLAN = EvaluationPlan("step-0", 0, ("sampled", "greedy"))


# -- a turn --------------------------------------------------------------------------------------


async def two_turns(bench: TwoBuckets, t: Trajectory) -> None:
    """Run a turn at one engine and, after a tool's failure, one at the other with its cache."""
    router = bench.router
    async with router.create_assignment(t) as assignment:
        await assignment.generate(PROMPT + 30)
        t.open_turn = Turn("", 30, "run", None, "error: no", has_tool_value=True)
        router.on_tool_return(assignment)
        t.append([4, 5])
        await assignment.generate(PROMPT + 52)


def list_in_use(bench: TwoBuckets) -> dict[str, Any]:
    router = bench.router
    in_use = {
        "stays": list(router.assignments),
        "queue": router.queue_length,
        "waits": bench.rollout.waits.list_longest([]),
        "held": [
            assignment.trajectory.id
            for link in router.links.values()
            for assignment in link.assignments
        ],
        "out": [
            assignment.trajectory.id
            for link in router.links.values()
            for assignment in link.running_assignments
        ],
        "requests": router._group_commit._staging.open_count,
        "moves": [one for one in asyncio.all_tasks() if one.get_name() == "cache move"],
        "running": sum(service.engine.num_running for service in bench.engines.values()),
    }
    return {what: amount for what, amount in in_use.items() if amount}


@pytest.mark.parametrize("crowd, awaits", [(0, 2), (2 * SLOTS, 3)], ids=["moves", "queues"])
@story_on(partial(run_virtual, limit_s=36000.0), given=2)
async def test_turn_cancelled_at_any_await_releases_everything(
    clock: VirtualClock, random: Random, crowd: int, awaits: int
) -> None:
    bench = TwoBuckets(clock, random)
    await bench.start()
    await bench.add("engine/g1")
    await clock.sleep(2 * POLL_S)
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
        assert list_in_use(bench) == {}, f"cancelled at await {at}"
        assert bench.router.free_requests == ENGINES * SLOTS
        if not interruption.has_cancelled:
            break
    assert interruption.awaits >= awaits and t.length == PROMPT + 52
    assert crowd or bench.router.cache_actions["move"] > 1, "it was cancelled while its cache came"


# -- groups and evaluations ----------------------------------------------------------------------


@pytest.mark.rotating(2)
@story_on(run_on_shard, "tmp_path")
async def test_group_cancelled_at_any_await_releases_everything(bench: ShardBench) -> None:
    at = 0
    while True:
        at += 1
        interruption = bench.job.runner.interruption = Interruption(at)
        group = await bench.group()
        interruption.task = group
        await asyncio.gather(group, return_exceptions=True)
        await bench.wait_until_idle()
        assert bench.list_in_use() == {}, f"cancelled at await {at}"
        if not interruption.has_cancelled:
            break
    assert at > 20 and bench.job.groups_finished >= 1
    await assert_full_width(bench)


@pytest.mark.deep
@story_on(run_on_shard, "tmp_path")
async def test_evaluation_cancelled_at_any_await_releases_everything(bench: ShardBench) -> None:
    at = 0
    while True:
        at += 1
        interruption = bench.job.runner.interruption = Interruption(at)
        work = interruption.watch(EvaluationRun(bench.job, PLAN, at).run())
        task = asyncio.create_task(work)
        interruption.task = task
        results = await asyncio.gather(task, return_exceptions=True)
        await bench.wait_until_idle()
        assert bench.list_in_use() == {}, f"cancelled at await {at}"
        if not interruption.has_cancelled:
            break
    assert at > 20 and not isinstance(results[0], BaseException)
    assert results[0]["failed"] == 0
    await assert_full_width(bench)


async def assert_full_width(bench: ShardBench) -> None:
    """Check that all engines fill up again and that their requests end."""
    bench.job.runner.interruption = Interruption()
    many = [await bench.group() for _ in range(2 * ENGINES * SLOTS)]
    widest = 0
    while not all(group.done() for group in many):
        await bench.clock.sleep(0.02)
        running = sum(service.engine.num_running for service in bench.engines)
        widest = max(widest, running)
    assert widest == ENGINES * SLOTS
    await bench.wait_until_idle()
    assert bench.list_in_use() == {}


ERRORS = [PeerLost, DeadlineExceeded, Overloaded]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("error", ERRORS)
@story_on(run_on_shard, "tmp_path")
async def test_any_failed_call_of_a_group_releases_everything(
    bench: ShardBench, error: type[MeshError]
) -> None:
    failed: set[str] = set()
    for at in range(1, 100):
        bench.calls.arm(at, lambda: error("it was made to"))
        await (await bench.group())
        result = await EvaluationRun(bench.job, PLAN, at).run()
        await bench.wait_until_idle()
        assert bench.list_in_use() == {}, bench.calls.calls
        assert result["problems"] == 1 and result["mixed"] == 0
        if len(bench.calls.calls) < at:
            break
        failed.add(bench.calls.calls[at - 1].split()[0])
    assert {"submit", "run_tools", "score_trajectories"} <= failed, failed
    assert bench.job.groups_finished == at
    await assert_full_width(bench)


@story_on(run_on_shard, "tmp_path")
async def test_any_failed_redis_script_releases_everything(bench: ShardBench) -> None:
    async def run_group_and_evaluation(number: int) -> list[str]:
        await (await bench.group())
        await EvaluationRun(bench.job, PLAN, number).run()
        await bench.wait_until_idle()
        assert bench.list_in_use() == {}, bench.scripts.calls
        return bench.scripts.calls

    bench.scripts.arm(0, None)
    names = dict.fromkeys(await run_group_and_evaluation(0))
    assert {"mark_group_ready", "record_evaluation", "list_entries"} <= names.keys()
    for number, name in enumerate(names, 1):
        bench.scripts.arm(1, lambda: StateUnavailable("it was made to"), name)
        script_names = await run_group_and_evaluation(number)
        assert script_names.count(name) > 1, f"{name} was not asked again"
    await assert_full_width(bench)
