"""Virtual time of a whole mesh: its leading planner is stopped, and nothing is lost."""

from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import Fenced
from meshrl.common.state import events, groups, jobs, leader
from meshrl.common.state.lifecycle.accounting import account
from meshrl.common.state.pool.placing.decisions import Dissolve, Why
from meshrl.common.state.pool.store import store as pool
from meshrl.sim.mesh.job.job import JOB
from meshrl.sim.mesh.world.world import Size, World
from tests.mesh.simulated.worlds import on_world

HOUR_S = 3600.0
LEASE_S = 6.0
STEPS = 10_000  # more than an hour has


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "whole_s", [HOUR_S / 12, pytest.param(HOUR_S, marks=pytest.mark.deep)], ids=["minutes", "hour"]
)
def test_a_mesh_with_a_stopped_leader_loses_nothing(
    tmp_path: Path, record_property: Any, whole_s: float
) -> None:
    async def play(world: World) -> dict[str, Any]:
        clock, state = world.clock, world.state
        await clock.sleep(whole_s / 2)
        owner, token = await leader.leader(state, "planner")
        name = owner.partition("#")[0]
        before = await jobs.job(state, JOB)
        next(p for p in world.machine.alive if p.name == name).stop()
        stopped = clock.monotonic()
        while (await leader.leader(state, "planner"))[1] in (0, token):
            assert clock.monotonic() - stopped < 10 * LEASE_S, "no standby took over"
            await clock.sleep(0.1)
        takeover_s = clock.monotonic() - stopped
        with pytest.raises(Fenced):
            await pool.write(state, token, "late", [Dissolve("g0", Why("a late one"))], None)
        await clock.sleep(whole_s - clock.monotonic())
        return {
            "takeover_s": takeover_s,
            "before": before,
            "events": await events.read_all(state),
            "in_flight": (await groups.in_flight(state, JOB)).samples,
            "job": await jobs.job(state, JOB),
            "gangs": await pool.gangs(state),
            "new_leader": (await leader.leader(state, "planner"))[0],
            "old_leader": owner,
        }

    seen = on_world(tmp_path, Size(workers=3, steps=STEPS), play)
    record_property("takeover_s", seen["takeover_s"])
    assert seen["new_leader"] != seen["old_leader"]
    assert seen["job"].version > seen["before"].version > 10
    assert all(gang.settled for gang in seen["gangs"])
    moved = [e for e in seen["events"] if e.kind == "move"]
    assert moved and moved[0].fields["rule"] == "stage_time"
    assert moved[0].fields["train_s"] > moved[0].fields["rollout_s"]
    terms = account(seen["events"], seen["in_flight"], JOB)
    assert terms["lost"] == terms["trained_twice"] == terms["typed_drops"] == 0
    assert terms["trained"] > 0
