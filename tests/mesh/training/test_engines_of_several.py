"""A job whose engine is a gang of two workers: it trains, and goes on when one of them is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest

from tests.mesh.running import Run, slow_pace

pytestmark = pytest.mark.timeout(300)

STEPS = 8


@pytest.mark.deep
def test_a_job_trains_with_an_engine_of_two_workers_and_goes_on_when_one_is_killed(
    run: Callable[..., Run],
) -> None:
    mesh = run(
        mesh__workers=3,
        rollout__tensor_parallel="[2]",
        rollout__pace=slow_pace(12, 16, 20000),
        budget__steps=STEPS,
    )

    def engines() -> list[str]:
        found = mesh.redis.scan_iter("{mesh}:entry:engine/*")
        names = sorted(key.partition(":entry:")[2] for key in found)
        return [name for name in names if mesh.entry(name)]

    def serving() -> list[str]:
        ready = [name for name in engines() if mesh.entry(name)["stats"].get("ready")]
        return ready if mesh.version >= 1 else []

    [engine] = mesh.until("an engine that serves", serving)
    about = mesh.entry(engine)
    assert about["stats"]["tensor_parallel"] == 2

    gang = engine.partition("/")[2].partition(".")[0]
    workers = mesh.redis.hget(f"{{mesh}}:gang:{gang}", "workers")
    assert workers is not None
    first, second = json.loads(workers)
    worker = mesh.pid(f"worker/{second}")
    os.kill(worker, signal.SIGKILL)
    mesh.pid(f"worker/{second}", other_than=worker)
    before = mesh.version
    mesh.until("a step after it", lambda: mesh.version > before)

    worker = mesh.pid(f"worker/{first}")  # with the engine's process, which is its child
    os.kill(worker, signal.SIGKILL)
    mesh.pid(engine, other_than=about["pid"])
    assert mesh.finish() == 0
    summary = mesh.summary()
    assert (summary["phase"], summary["steps"], summary["lost"]) == ("finished", STEPS, 0)
