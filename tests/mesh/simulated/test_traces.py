"""What a whole mesh has noted of a job makes a trace in which everything has its place."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from meshrl.common.state import events
from meshrl.common.state.events import Event
from meshrl.sim.mesh.world.world import Size, World
from meshrl.view.trace import writing
from tests.mesh.simulated.worlds import on_world, until_over
from tests.traced import check, spans_of

STEPS = 6


async def story(world: World) -> list[Event]:
    await until_over(world)
    return await events.read_all(world.state)


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_a_run_of_two_shards_is_traced_from_its_prompts_to_its_weights(tmp_path: Path) -> None:
    seen = on_world(tmp_path, Size(workers=3, shards=2, steps=STEPS), story, seed=2)
    path = tmp_path / "trace.json"
    assert writing.write(tmp_path, path, seen) > 100
    found = json.loads(path.read_text())["traceEvents"]
    check(found)

    begun = [s for n in (0, 1) for s in spans_of(found, f"shard {n}") if "args" in s]
    trained = {s["args"]["group"] for s in begun if "trained in step" in s["args"]}
    assert {e["id"] for e in found if e["ph"] == "s"} == trained
    steps = [e.fields for e in seen if e.kind == "step"]
    assert trained == {row["group"] for fields in steps for row in fields["groups"]}
    inside = Counter(s["name"] for n in (0, 1) for s in spans_of(found, f"shard {n}"))
    assert min(inside[name] for name in ("open", "queue", "prefill", "decode")) > 0, inside

    trainer = Counter(span["name"] for span in spans_of(found, "trainer"))
    assert [trainer[f"step {n}"] for n in range(1, STEPS + 1)] == [1] * STEPS
    assert trainer["train"] == trainer["sync: stage"] == STEPS, trainer
    assert trainer["round"] >= STEPS and trainer["checkpoint: write"] >= 2
    versions = {s["name"] for s in spans_of(found, "engines") if s["name"].startswith("version")}
    assert f"version {STEPS}" in versions
    roles = {span["name"] for span in spans_of(found, "gangs")}
    assert {"training", "rollout"} <= roles
