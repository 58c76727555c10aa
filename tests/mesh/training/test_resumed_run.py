"""A run that is cut off and resumed, with what Redis held and then without it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.launch import leftovers
from tests.load import scaled
from tests.mesh.running import Run, slow_pace

STEPS, STALENESS = 10, 1


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_run_that_is_cut_off_accounts_for_all_and_keeps_its_staleness(
    run: Callable[..., Run],
) -> None:
    mesh = run(
        budget__steps=STEPS,
        algorithm__max_staleness=STALENESS,
        algorithm__filter_zero_variance="false",
        training__checkpoint_every=2,
        rollout__pace=slow_pace(10, 64, 100000),
    )
    mesh.until("three steps and groups under way in the record", lambda: under_way(mesh, 3))
    first = mesh.pid("trainer/digits")
    crash(mesh)

    mesh.resume()
    second = mesh.pid("trainer/digits", other_than=first)
    mesh.until("six steps", lambda: mesh.version >= 6)
    os.kill(second, signal.SIGKILL)  # it is not to finish while the run ends
    mesh.end()
    shutil.rmtree(mesh.directory / "mesh/redis")
    for path in mesh.directory.glob("store/??/*"):  # nothing is kept for being young
        os.utime(path, (0, 0))

    mesh.resume()
    assert mesh.finish() == 0, mesh.said
    summary, found = mesh.summary(), mesh.audit()
    assert (summary["phase"], summary["steps"]) == ("finished", STEPS)
    assert (found["lost"], found["trained_twice"]) == (0, 0)
    written = [mesh.directory, *mesh.directory.rglob("*")]
    assert [p for p in written if not p.is_symlink() and p.stat().st_mode & 0o077] == []
    lines = (mesh.directory / "metrics.jsonl").read_text().splitlines()
    staleness = [
        step["staleness_max"] for step in map(json.loads, lines) if "staleness_max" in step
    ]
    assert len(staleness) >= STEPS and max(staleness) <= STALENESS
    steps: dict[int, list[int]] = {0: [], 1: []}
    for event in mesh.events("step"):
        steps[event["lineage"]].append(event["step"])
    assert steps[0] == list(range(1, len(steps[0]) + 1)), "Redis went on from where it was"
    assert len(steps[0]) >= 6
    assert steps[1] == list(range(steps[1][0], STEPS + 1))
    assert steps[1][0] <= len(steps[0]) + 1, "without it, from the last checkpoint"


def under_way(mesh: Run, steps: int) -> set[int]:
    """Groups that were opened and not trained on, once there were so many steps."""
    trained = [row["group"] for event in mesh.events("step") for row in event["groups"]]
    opened = {group for event in mesh.events("opened") for group in event["groups"]}
    return opened - set(trained) if len(mesh.events("step")) >= steps else set()


def crash(mesh: Run) -> None:
    """Kills everything at once: the record that is left accounts for each trajectory."""
    mesh.program.send_signal(signal.SIGKILL)
    mesh.program.wait(scaled(10.0))
    assert not (mesh.directory / "in_flight.json").exists()
    found = mesh.audit()
    assert (found["lost"], found["trained_twice"]) == (0, 0), found
    assert found["trained"] >= 3 * 2 * 4 and found["in_flight"] > 0
    end_mesh((mesh.directory / "mesh/settings.json").resolve())


def end_mesh(settings: Path) -> None:
    """Ends what waits for an agent that will not come: workers give it a minute."""
    asyncio.run(leftovers.end_all(settings, scaled(5.0)))
    assert leftovers.belonging_to(settings) == []
