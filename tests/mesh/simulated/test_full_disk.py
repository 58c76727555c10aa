"""A disk that is full under the ledger for a while: trajectories wait, go on, and none is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.random import Random
from common.records import ledger
from common.state import events, groups, registry
from common.state.accounting import account
from services.rollout.shard import RolloutShard
from services.rollout.trajectory import Restored
from sim.loop import VirtualClock, run_virtual
from sim.mesh import JOB, World

FULL_AT_S = 100.0
FULL_S = 60.0
END_S = 400.0


def test_trajectories_wait_for_room_and_none_is_lost(tmp_path: Path) -> None:
    async def story(clock: VirtualClock, random: Random) -> dict[str, Any]:
        world = World(clock, random, tmp_path)
        await world.start(workers=3)
        await clock.sleep(FULL_AT_S)
        rollout = next(p for p in world.processes if p.name == "rollout/0")
        shard = rollout.actor
        assert isinstance(shard, RolloutShard) and shard.serving is not None
        rollout.host.disk_bytes = 0
        await clock.sleep(FULL_S / 2)
        halfway = {t.id: t.tokens.tolist() for t in shard.serving.active}
        await clock.sleep(FULL_S / 2)
        restored = Restored()
        for record in ledger.read(shard.serving.ledger.directory):
            restored.apply(record, shard.serving.seed_of)
        waiting = {t.id: t.tokens.tolist() for t in shard.serving.active}
        entry = await registry.lookup(world.state, "rollout/0")
        assert entry is not None
        seen = {
            "steps_when_full": world.steps,
            "halfway": halfway,
            "waiting": waiting,
            "sampled": {
                t.id: t.tokens.tolist() for t in shard.serving.active if t.length > t.prompt_length
            },
            "written": {t.id: t.tokens.tolist() for t in restored.trajectories.values()},
            "waits": [wait["what"] for wait in entry.waits],
        }
        rollout.host.disk_bytes = -1
        await clock.sleep(END_S - clock.monotonic())
        for process in world.processes:
            process.check()
        return seen | {
            "steps": world.steps,
            "events": await events.read_all(world.state),
            "in_flight": (await groups.in_flight(world.state, JOB)).samples,
        }

    seen = run_virtual(story, seed=1, limit_s=2 * END_S)
    assert seen["waiting"] and seen["waiting"] == seen["halfway"], "nothing counts while it is full"
    for trajectory, tokens in seen["sampled"].items():
        assert seen["written"][trajectory] == tokens, "what counts is what is written"
    assert "room for the ledger" in seen["waits"]
    assert seen["steps"] > seen["steps_when_full"] + 1
    told = account(seen["events"], seen["in_flight"], JOB)
    assert (told["lost"], told["trained_twice"], told["typed_drops"]) == (0, 0, 0)
    assert told["trained"] + told["filtered"] > 0
