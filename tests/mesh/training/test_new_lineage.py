"""Engines of several workers, and the lineage of weights that follows a loss."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest

from meshrl.common.base.files.sealed_documents import encode_sealed, read_sealed
from tests.mesh.running import Run, slow_pace

pytestmark = pytest.mark.timeout(300)


STEPS, EVERY, STALENESS = 8, 4, 1


def stop_trainer_at(mesh: Run, version: int, lineage: str) -> int:
    """Stop the trainer after the version and before the next checkpoint; return its pid."""

    def has_version() -> bool:
        return mesh.version >= version and mesh.redis.hget("{digits}:job", "lineage") == lineage

    mesh.until(f"version {version} of lineage {lineage}", has_version)
    pid = mesh.pid("trainer/digits")
    os.kill(pid, signal.SIGSTOP)
    assert mesh.version // EVERY == version // EVERY
    return pid


@pytest.mark.deep
def test_new_ranks_open_one_lineage_and_continue(run: Callable[..., Run]) -> None:
    mesh = run(
        budget__steps=STEPS,
        algorithm__max_staleness=STALENESS,
        training__checkpoint_every=EVERY,
        # trajectories are in flight when the trainer is killed
        rollout__pace=slow_pace(10, 64, 100000),
    )
    mesh.until("a first step", lambda: mesh.version >= 1)
    trainer = stop_trainer_at(mesh, EVERY + 1, lineage="0")
    name = mesh.redis.hget("{digits}:job", "checkpoint")
    assert isinstance(name, str)
    checkpoint = mesh.directory / f"checkpoints/{name}.json"
    record = read_sealed(checkpoint)
    assert (record["step"], record["account"]["ranks"]) == (EVERY, 1)
    record["account"]["ranks"] = 2
    checkpoint.write_bytes(encode_sealed(record))
    os.kill(trainer, signal.SIGKILL)

    trainer = stop_trainer_at(mesh, EVERY + 1, lineage="1")  # one rank has made its step
    os.kill(trainer, signal.SIGKILL)

    assert mesh.finish() == 0, mesh.output
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


PARALLEL_STEPS = 8


@pytest.mark.deep
def test_job_continues_after_the_loss_of_an_engine_of_two_workers(
    run: Callable[..., Run],
) -> None:
    mesh = run(
        mesh__workers=3,
        rollout__tensor_parallel="[2]",
        rollout__pace=slow_pace(12, 16, 20000),
        budget__steps=PARALLEL_STEPS,
    )

    def engines() -> list[str]:
        found = mesh.redis.scan_iter("{mesh}:entry:engine/*")
        names = sorted(key.partition(":entry:")[2] for key in found)
        return [name for name in names if mesh.entry(name)]

    def has_serving_engines() -> list[str]:
        ready = [name for name in engines() if mesh.entry(name)["stats"].get("ready")]
        return ready if mesh.version >= 1 else []

    [engine] = mesh.until("an engine that serves", has_serving_engines)
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
    assert (summary["phase"], summary["steps"], summary["lost"]) == ("finished", PARALLEL_STEPS, 0)
