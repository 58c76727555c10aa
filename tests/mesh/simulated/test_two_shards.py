"""One job on two rollout shards: the same accounting as on one."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.state import events, groups
from meshrl.common.state.lifecycle.accounting import account
from meshrl.sim.mesh.job.job import JOB
from meshrl.sim.mesh.world.world import Size, World
from tests.mesh.simulated.worlds import on_world, until_over

STEPS = 12  # who finds the gate open takes what it lets through: in fewer steps, one takes all


def run(root: Path, shards: int) -> tuple[dict[str, int], Counter[str], list[int]]:
    """(accounting, trained groups by shard, prompts of the groups that were opened)."""

    async def job(world: World) -> dict[str, Any]:
        await until_over(world)
        state = world.state
        in_flight = (await groups.in_flight(state, JOB)).samples
        return {"events": await events.read_all(state), "in_flight": in_flight}

    root.mkdir()
    seen = on_world(root, Size(workers=3, shards=shards, steps=STEPS), job, seed=2)
    opened = [e.fields for e in seen["events"] if e.kind == "opened"]
    shard_of = {group: fields["shard"] for fields in opened for group in fields["groups"]}
    trained = [row for e in seen["events"] if e.kind == "step" for row in e.fields["groups"]]
    by_shard = Counter(shard_of[row["group"]] for row in trained)
    prompts = sorted(prompt for fields in opened for prompt in fields["prompts"])
    return account(seen["events"], seen["in_flight"], JOB), by_shard, prompts


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_two_shards_give_the_same_accounting_as_one(tmp_path: Path) -> None:
    one, _, prompts_of_one = run(tmp_path / "one", 1)
    two, by_shard, prompts_of_two = run(tmp_path / "two", 2)
    assert one == two
    assert two["lost"] == two["trained_twice"] == two["in_flight"] == 0
    assert prompts_of_one == prompts_of_two
    assert set(by_shard) == {"rollout/simulated/0", "rollout/simulated/1"}
