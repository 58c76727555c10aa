"""An hour of a mesh in seconds: planner, rollout and weights work, a leader is stopped."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import Fenced
from common.random import Random
from common.state import events, gangs, groups, jobs, leader
from common.state.accounting import account
from sim.loop import VirtualClock, run_virtual
from sim.mesh import JOB, World

HOUR_S = 3600.0
STOP_AT_S = 1200.0
LEASE_S = 6.0


@pytest.mark.timeout(600)
def test_an_hour_with_a_stopped_leader_loses_nothing(tmp_path: Path, record_property: Any) -> None:
    async def hour(clock: VirtualClock, random: Random) -> dict[str, Any]:
        world = World(clock, random, tmp_path)
        await world.start(workers=3)
        await clock.sleep(STOP_AT_S)
        owner, token = await leader.leader(world.state, "planner")
        name = owner.partition("#")[0]
        steps_before = world.steps
        next(p for p in world.processes if p.name == name).stop()
        stopped = clock.monotonic()
        while (await leader.leader(world.state, "planner"))[1] in (0, token):
            assert clock.monotonic() - stopped < 10 * LEASE_S, "no standby took over"
            await clock.sleep(0.1)
        takeover_s = clock.monotonic() - stopped
        with pytest.raises(Fenced):
            await gangs.set_desired(
                world.state, token, "g0", "idle", "", False, "a stopped leader's", "late"
            )
        await clock.sleep(HOUR_S - clock.monotonic())
        for process in world.processes:
            process.check()
        return {
            "takeover_s": takeover_s,
            "steps_before": steps_before,
            "steps": world.steps,
            "events": await events.read_all(world.state),
            "in_flight": (await groups.in_flight(world.state, JOB)).samples,
            "job": await jobs.job(world.state, JOB),
            "gangs": await gangs.gangs(world.state),
            "new_leader": (await leader.leader(world.state, "planner"))[0],
            "old_leader": owner,
        }

    seen = run_virtual(hour, seed=1, limit_s=2 * HOUR_S)
    record_property("takeover_s", seen["takeover_s"])
    assert seen["new_leader"] != seen["old_leader"]
    assert seen["steps"] > seen["steps_before"] > 10
    assert all(gang.settled for gang in seen["gangs"])
    moved = [e for e in seen["events"] if e.kind == "move"]
    assert moved and moved[0].fields["policy"] == "stage_time"
    assert moved[0].fields["train_s"] > moved[0].fields["rollout_s"]
    terms = account(seen["events"], seen["in_flight"], JOB)
    assert terms["lost"] == terms["trained_twice"] == terms["typed_drops"] == 0
    assert terms["trained"] > 0
