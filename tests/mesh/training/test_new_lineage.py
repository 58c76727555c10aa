"""A run that cannot go on as it was: a new lineage begins at its checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from meshrl.common.base.files.sealed import read_sealed, sealed
from tests.mesh.running import Run, slow_pace

pytestmark = pytest.mark.timeout(300)
STEPS, EVERY, STALENESS = 8, 4, 1


def trainer_stopped_at(mesh: Run, version: int, lineage: str) -> int:
    """The trainer's pid, once the version is there and before the next checkpoint is."""

    def there() -> bool:
        return mesh.version >= version and mesh.redis.hget("{digits}:job", "lineage") == lineage

    mesh.until(f"version {version} of lineage {lineage}", there)
    pid = mesh.pid("trainer/digits")
    os.kill(pid, signal.SIGSTOP)
    assert mesh.version // EVERY == version // EVERY
    return pid


@pytest.mark.deep
def test_other_ranks_open_one_lineage_and_go_on_in_it(run: Callable[..., Run]) -> None:
    mesh = run(
        budget__steps=STEPS,
        algorithm__max_staleness=STALENESS,
        training__checkpoint_every=EVERY,
        # trajectories are under way when the trainer is killed
        rollout__pace=slow_pace(10, 64, 100000),
    )
    mesh.until("a first step", lambda: mesh.version >= 1)
    trainer = trainer_stopped_at(mesh, EVERY + 1, lineage="0")
    name = mesh.redis.hget("{digits}:job", "checkpoint")
    assert isinstance(name, str)
    checkpoint = mesh.directory / f"checkpoints/{name}.json"
    held = read_sealed(checkpoint)
    assert (held["step"], held["account"]["ranks"]) == (EVERY, 1)
    held["account"]["ranks"] = 2
    checkpoint.write_bytes(sealed(held))
    os.kill(trainer, signal.SIGKILL)

    trainer = trainer_stopped_at(mesh, EVERY + 1, lineage="1")  # one rank has made its step
    os.kill(trainer, signal.SIGKILL)

    assert mesh.finish() == 0, mesh.said
    summary, found = mesh.summary(), mesh.audit()
    assert (summary["phase"], summary["steps"]) == ("finished", STEPS)
    assert (found["lost"], found["trained_twice"]) == (0, 0)
    [opened] = mesh.events("lineage")
    assert (opened["lineage"], opened["version"]) == (1, EVERY)
    steps = mesh.events("step")
    last = [event["step"] for event in steps if event["lineage"] == 1]
    assert last == list(range(EVERY + 1, STEPS + 1))
    for event in steps:
        metrics = event["metrics"]
        assert 0 <= metrics["staleness"] <= metrics["staleness_max"] <= STALENESS
