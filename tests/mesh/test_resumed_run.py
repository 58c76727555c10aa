"""A run that is stopped and resumed, with what Redis held and then without it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable

import pytest

from tests.mesh.running import Run

STEPS, STALENESS = 10, 1


@pytest.mark.timeout(240)
@pytest.mark.xdist_group("mesh")
def test_staleness_stays_bounded_and_nothing_is_trained_twice(run: Callable[..., Run]) -> None:
    mesh = run(
        budget__steps=STEPS,
        algorithm__max_staleness=STALENESS,
        training__checkpoint_every=2,
        rollout__pace="5/64/100000",  # trajectories are under way when the run is stopped
    )
    stop_at(mesh, 3)
    mesh.resume()
    stop_at(mesh, 6)
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
    steps = {lineage: [] for lineage in (0, 1)}
    for event in mesh.events("step"):
        steps[event["lineage"]].append(event["step"])
    assert steps[0] == list(range(1, len(steps[0]) + 1)), "Redis went on from where it was"
    assert steps[1] == list(range(steps[1][0], STEPS + 1)) and len(steps[0]) >= 6
    assert steps[1][0] <= len(steps[0]) + 1, "its loss costs what no checkpoint has"


def stop_at(mesh: Run, version: int) -> None:
    """Ends the run some time after a version; it cannot finish before, as its trainer is killed."""
    mesh.until(f"version {version}", lambda: mesh.version >= version)
    os.kill(mesh.pid("trainer/digits"), signal.SIGKILL)
    mesh.end()
