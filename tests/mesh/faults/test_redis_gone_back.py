"""Redis comes back older than it was under a running mesh: the run goes on, and nothing is done
twice.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable

import pytest

from loadtests.history.checking import check
from tests.mesh.running import Run

STEPS = 40  # they take seconds: Redis ends on the way


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_run_whose_redis_goes_back_goes_on_from_its_checkpoint_in_a_new_lineage(
    run: Callable[..., Run],
) -> None:
    mesh = run(budget__steps=STEPS, training__checkpoint_every=2, rollout__max_tokens=48)
    file = mesh.directory / "mesh/redis/appendonlydir/appendonly.aof.1.incr.aof"
    mesh.until("a step", lambda: mesh.version >= 2)
    shorter = file.stat().st_size
    mesh.until("a step that was recorded", lambda: len(mesh.events("step")) >= 4)
    os.kill(int(mesh.redis.info("server")["process_id"]), signal.SIGKILL)
    os.truncate(file, shorter)

    assert mesh.finish() == 0, mesh.said
    assert "redis is not as it was" in mesh.said
    (damaged,) = [event for event in mesh.events("damaged") if event["what"] == "redis"]
    assert damaged["aside"] and "new lineage" in damaged["then"]
    restored = mesh.events("restored")
    assert [event["lineage"] for event in restored] == [1] and restored[0]["version"] >= 2
    commits = Counter((event["lineage"], event["step"]) for event in mesh.events("step"))
    assert max(commits.values()) == 1 and (1, STEPS) in commits
    opened = Counter(group for event in mesh.events("opened") for group in event["groups"])
    assert max(opened.values()) == 1
    found, summary = mesh.audit(), mesh.summary()
    history = check(mesh.directory)
    assert history["problems"] == [] and found.items() <= history.items()
    assert (found["lost"], found["trained_twice"]) == (0, 0)
    assert found["host_lost"] > 0 and summary["steps"] == STEPS
