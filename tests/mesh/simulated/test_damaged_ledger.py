"""A shard that dies and starts again on a damaged ledger goes on, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.files.damage import EVENT, QUARANTINE
from meshrl.common.records import ledger
from meshrl.common.state import events, groups
from meshrl.common.state.lifecycle.accounting import account
from meshrl.sim.mesh.job.job import JOB
from meshrl.sim.mesh.world.world import Size, World
from tests.mesh.simulated.worlds import on_world, until_over

DAMAGED_AT_S = 60.0


def damage_last_segment(root: Path) -> Path:
    (directory,) = {segment.parent for segment in root.rglob("*.ledger")}
    segment = ledger.segments(directory)[-1]
    content = bytearray(segment.read_bytes())
    assert len(content) > len(ledger.HEADER)
    content[2] ^= 1
    segment.write_bytes(content)
    return segment


@pytest.mark.deep
def test_a_flipped_byte_in_a_header_costs_what_was_under_way_and_no_trajectory(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> dict[str, Any]:
        await world.clock.sleep(DAMAGED_AT_S)
        shard = next(p for p in world.machine.alive if p.name == "rollout/simulated/0")
        shard.kill()
        segment = damage_last_segment(tmp_path)
        await until_over(world)
        state = world.around.meshes["rollout/simulated/0"].state
        return {
            "segment": segment,
            "events": await events.read_all(state),
            "in_flight": (await groups.in_flight(state, JOB)).samples,
        }

    seen = on_world(tmp_path, Size(steps=14), story)
    (told,) = [e for e in seen["events"] if e.kind == EVENT]
    assert told.fields["path"] == str(seen["segment"]) and "prompt" in told.fields["then"]
    assert QUARANTINE in told.fields["aside"] and Path(told.fields["aside"]).is_file()
    counted = account(seen["events"], seen["in_flight"], JOB)
    assert (counted["lost"], counted["trained_twice"]) == (0, 0)
    assert counted["trained"] > 0
