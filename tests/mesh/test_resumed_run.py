"""A run that is stopped and resumed, with what Redis held or without it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable

import pytest

from tests.mesh.running import Run

pytestmark = [pytest.mark.timeout(150), pytest.mark.xdist_group("mesh")]
STEPS, STALENESS = 8, 1


@pytest.mark.parametrize("redis_lost", [False, True], ids=["redis kept", "redis lost"])
def test_staleness_stays_bounded_and_nothing_is_trained_twice(
    run: Callable[..., Run], redis_lost: bool
) -> None:
    mesh = run(
        budget__steps=STEPS,
        algorithm__max_staleness=STALENESS,
        training__checkpoint_every=2,
        rollout__pace="2/64/100000",  # trajectories are under way when the run is stopped
    )
    mesh.until("three steps", lambda: mesh.version >= 3)
    os.kill(mesh.pid("trainer/digits"), signal.SIGKILL)  # it is not to finish while the run ends
    mesh.end()
    if redis_lost:
        shutil.rmtree(mesh.directory / "mesh/redis")
        for path in mesh.directory.glob("store/??/*"):  # nothing is kept for being young
            os.utime(path, (0, 0))
    mesh.resume()
    assert mesh.finish() == 0, mesh.said
    summary = mesh.summary()
    assert (summary["phase"], summary["steps"]) == ("finished", STEPS)
    found = mesh.audit()
    assert (found["lost"], found["trained_twice"]) == (0, 0)
    lines = (mesh.directory / "metrics.jsonl").read_text().splitlines()
    staleness = [
        step["staleness_max"] for step in map(json.loads, lines) if "staleness_max" in step
    ]
    assert len(staleness) >= STEPS and max(staleness) <= STALENESS
    steps = mesh.events("step")
    assert [e["step"] for e in steps if e["lineage"] == steps[-1]["lineage"]][-1] == STEPS
    assert {e["lineage"] for e in steps} == ({0, 1} if redis_lost else {0})
