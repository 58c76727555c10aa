"""A disk that is full for a while: trajectories wait, go on, and none is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshrl.common.records import ledger
from meshrl.common.state import events, groups, jobs, registry
from meshrl.common.state.lifecycle.accounting import account
from meshrl.services.rollout.shard import RolloutShard
from meshrl.services.rollout.trajectories.trajectory import Restored
from meshrl.sim.mesh.job.job import JOB
from meshrl.sim.mesh.world.world import Size, World
from tests.mesh.simulated.worlds import on_world, until_over

FULL_AT_S = 60.0
FULL_S = 60.0


@pytest.mark.deep
def test_trajectories_wait_for_room_and_none_is_lost(tmp_path: Path) -> None:
    async def story(world: World) -> dict[str, Any]:
        clock = world.clock
        await clock.sleep(FULL_AT_S)
        mesh = world.around.meshes["rollout/simulated/0"]
        shard = mesh._actor
        assert isinstance(shard, RolloutShard) and shard.serving is not None
        world.machine.disk.room = 0
        await clock.sleep(FULL_S / 2)
        halfway = {t.id: t.tokens.tolist() for t in shard.serving.runner.active}
        await clock.sleep(FULL_S / 2)
        restored = Restored()
        for record in ledger.read(shard.serving.runner.ledger.directory):
            restored.apply(record, shard.serving.seed_of)
        waiting = {t.id: t.tokens.tolist() for t in shard.serving.runner.active}
        entry = await registry.lookup(mesh.state, "rollout/simulated/0")
        row = await jobs.job(mesh.state, JOB)
        assert entry is not None and row is not None
        seen = {
            "version_when_full": row.version,
            "halfway": halfway,
            "waiting": waiting,
            "sampled": {
                t.id: t.tokens.tolist()
                for t in shard.serving.runner.active
                if t.length > t.prompt_length
            },
            "written": {t.id: t.tokens.tolist() for t in restored.trajectories.values()},
            "waits": [wait["what"] for wait in entry.waits],
        }
        world.machine.disk.well()
        await until_over(world)
        return seen | {
            "events": await events.read_all(mesh.state),
            "in_flight": (await groups.in_flight(mesh.state, JOB)).samples,
        }

    seen = on_world(tmp_path, Size(steps=14), story)
    assert seen["version_when_full"] < 13
    assert seen["waiting"] and seen["waiting"] == seen["halfway"], "nothing counts while it is full"
    for trajectory, tokens in seen["sampled"].items():
        assert seen["written"][trajectory] == tokens, "what counts is what is written"
    assert "room for the ledger" in seen["waits"]
    told = account(seen["events"], seen["in_flight"], JOB)
    assert (told["lost"], told["trained_twice"], told["typed_drops"]) == (0, 0, 0)
    assert told["trained"] + told["filtered"] > 0
