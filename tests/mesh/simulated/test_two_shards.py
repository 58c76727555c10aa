"""One job on two rollout shards: the same accounting as on one."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.random import Random
from common.state import events, groups, jobs
from common.state.accounting import account
from sim.loop import VirtualClock, run_virtual
from sim.mesh import JOB, World

STEPS = 6


def run(root: Path, shards: int) -> tuple[dict[str, int], Counter[str], list[int]]:
    """(accounting, trained groups by shard, prompts of the groups that were opened)."""

    async def job(clock: VirtualClock, random: Random) -> dict[str, Any]:
        world = World(clock, random, root)
        await world.start(workers=3, shards=shards, steps=STEPS)
        while True:
            row = await jobs.job(world.state, JOB)
            if row is not None and row.version == STEPS:
                break
            await clock.sleep(1.0)
        for process in world.processes:
            process.check()
        in_flight = (await groups.in_flight(world.state, JOB)).samples
        return {"events": await events.read_all(world.state), "in_flight": in_flight}

    root.mkdir()
    seen = run_virtual(job, seed=2, limit_s=4 * 3600.0)
    opened = [e.fields for e in seen["events"] if e.kind == "opened"]
    shard_of = {group: fields["shard"] for fields in opened for group in fields["groups"]}
    trained = [row for e in seen["events"] if e.kind == "step" for row in e.fields["groups"]]
    by_shard = Counter(shard_of[row["group"]] for row in trained)
    prompts = sorted(prompt for fields in opened for prompt in fields["prompts"])
    return account(seen["events"], seen["in_flight"], JOB), by_shard, prompts


@pytest.mark.timeout(300)
def test_two_shards_give_the_same_accounting_as_one(tmp_path: Path) -> None:
    one, _, prompts_of_one = run(tmp_path / "one", 1)
    two, by_shard, prompts_of_two = run(tmp_path / "two", 2)
    assert one == two
    assert two["lost"] == two["trained_twice"] == two["in_flight"] == 0
    assert prompts_of_one == prompts_of_two
    assert set(by_shard) == {"rollout/0", "rollout/1"}
