"""All of a trajectory's time is accounted for, in the states that it goes through."""

from __future__ import annotations

import asyncio
from typing import Any

from meshrl.common.base.files.lines import whole
from meshrl.services.rollout.record.group_commit import WINDOW_S
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from tests.stories import story_on
from tests.unit.rollout.shard_bench import ENGINES, ShardBench, on_shard


async def told(bench: ShardBench) -> list[dict[str, Any]]:
    await bench.job.runner.times.close()
    return list(whole(bench.root / "trace" / "shard-0.jsonl"))


def states(row: dict[str, Any]) -> list[str]:
    """Less those that may take no time here."""
    return [state for state in row["parts"][::2] if state in ("prefill", "decode", "reward")]


@story_on(on_shard, "tmp_path")
async def test_a_trajectory_tells_its_states_from_its_begin_to_its_end(bench: ShardBench) -> None:
    bench.sandbox.takes_s = 2.0
    began = bench.clock.wall()
    await (await bench.group())
    ended = bench.clock.wall()
    rows = await told(bench)
    assert sorted(row["member"] for row in rows) == [0, 1, 2]
    for row in rows:
        assert states(row) == ["prefill", "decode", "prefill", "decode", "reward"]
        spent = dict.fromkeys(row["parts"][::2], 0.0)
        for state, ms in zip(row["parts"][::2], row["parts"][1::2], strict=True):
            spent[state] += ms / 1000
        assert spent["reward"] >= 2.0
        # 20 tokens a turn or so, at 100 a second, of which the first one ends the prefill
        assert spent["decode"] > spent["prefill"] - 2 * WINDOW_S > 0
        assert began <= row["at"] <= row["at"] + sum(spent.values()) <= ended + 1e-3
        assert (row["training"], row["ending"], row["reward"]) == (True, "done", 1.0)
        assert 0 < row["prompt"] < row["tokens"]
    last = max(row["at"] + sum(row["parts"][1::2]) / 1000 for row in rows)
    assert ended - last < 0.1  # the rest is the group's


@story_on(on_shard, "tmp_path")
async def test_who_waits_for_an_engine_is_in_the_queue(bench: ShardBench) -> None:
    for service in bench.engines:
        await service.mesh.leave()
    await bench.clock.sleep(10.0)
    group = await bench.group()
    await bench.clock.sleep(30.0)
    await bench._add_engine(ENGINES)
    await group
    for row in await told(bench):
        queued = row["parts"][row["parts"].index("queue") + 1]
        assert 29_000 < queued < 40_000


@story_on(on_shard, "tmp_path")
async def test_a_trajectory_that_is_cut_off_is_told_without_an_ending(bench: ShardBench) -> None:
    bench.sandbox.takes_s = 500.0
    group = asyncio.ensure_future(await bench.group())
    await bench.clock.sleep(30.0)
    group.cancel()
    await asyncio.gather(group, return_exceptions=True)
    rows = await told(bench)
    assert len(rows) == 3
    assert all(row["ending"] == "" and row["parts"][-2] == "reward" for row in rows)


@story_on(on_shard, "tmp_path")
async def test_a_group_that_is_not_traced_costs_no_line(bench: ShardBench) -> None:
    bench.job.runner.times._traces.share = 0.5  # every other group
    await (await bench.group())
    await (await bench.group())
    assert {row["group"] % 2 for row in await told(bench)} == {1}
    t = Trajectory(0, 0, 0, 0, 0)
    with bench.job.runner.times.of(t):
        assert not hasattr(t.watch, "parts")
