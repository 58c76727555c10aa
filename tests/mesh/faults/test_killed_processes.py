"""Killed processes, and a Redis that is silent or loses state: no trajectory is lost."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtests.history.checking import check
from meshrl.common.api.transfer.bulk_permissions import GROUPS
from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.encoding.blob import unpack
from meshrl.common.records import ledger
from meshrl.common.records.ledger import RecordKind, make_trajectory_id
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.launch.leftover_processes import find_leftovers
from meshrl.services.rollout.trajectories.trajectory import RestoredGroups, Trajectory
from tests.mesh.running import Run, slow_pace

pytestmark = pytest.mark.timeout(300)


def read_ledger(directory: Path) -> dict[int, Trajectory]:
    """Return the trajectories of a ledger, as a new shard would restore them."""
    restored = RestoredGroups()
    for record in ledger.iter_records(directory):
        restored.apply_record(record, lambda group, member: 0)
    return restored.trajectories


def read_trained_groups(run: Run) -> dict[int, np.ndarray]:
    """Return trajectory -> tokens of all groups that a step used, from the recorded bytes."""
    digests = {fields["group"]: fields["digest"] for fields in run.events("ready")}
    groups = ChunkStore(run.directory / "store").open_space(GROUPS)
    taken = [row["group"] for fields in run.events("step") for row in fields["groups"]]
    found: dict[int, np.ndarray] = {}
    for number in taken:
        digest = digests[number]
        content = unpack(TrajectoryGroup, groups.read(digest))
        ends = np.cumsum(content.lengths)
        for member, tokens in enumerate(np.split(content.tokens, ends[:-1])):
            found[make_trajectory_id(number, member)] = tokens
    return found


def assert_nothing_lost(run: Run, steps: int) -> dict[str, Any]:
    summary = run.summary()
    assert (summary["phase"], summary["steps"]) == ("finished", steps)
    fates = {key: summary[key] for key in ("lost", "trained_twice", "typed_drops")}
    assert set(fates.values()) == {0}, fates
    assert run.audit()["lost"] == 0
    return summary


SILENT_S = 6.5  # longer than a lease, shorter than the timeout of Redis' restart
AT_WORK = ("rollout/digits/0", "trainer/digits", "weights", "worker/w0", "worker/w1", "planner/0")


def test_nothing_is_lost_with_a_killed_shard_and_an_outage_longer_than_leases(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    # At 5 ms a step, trajectories of 250 tokens are unfinished when the shard is killed, and
    # steps remain after the outage.
    pace = slow_pace(5, 64, 100000)
    mesh = run(budget__steps=4, rollout__max_tokens=250, rollout__stop="[]", rollout__pace=pace)

    def many_tokens() -> bool:
        return mesh.in_ledger(RecordKind.TOKENS) >= 8

    mesh.until("tokens in the ledger", many_tokens)
    shard = mesh.pid("rollout/digits/0")
    os.kill(shard, signal.SIGSTOP)  # so that the copy equals its successor's input
    restored_tokens = read_ledger(mesh.copy_ledger(tmp_path / "left"))
    os.kill(shard, signal.SIGKILL)

    mesh.until("a step of the new shard", lambda: mesh.version >= 1)
    before = {name: mesh.pid(name) for name in AT_WORK}
    assert before["rollout/digits/0"] != shard
    redis = int(mesh.redis.info("server")["process_id"])
    version = mesh.version
    os.kill(redis, signal.SIGSTOP)
    time.sleep(SILENT_S)
    os.kill(redis, signal.SIGCONT)
    mesh.until("a step after the outage", lambda: mesh.version > version)
    assert {name: mesh.pid(name) for name in AT_WORK} == before

    assert mesh.finish() == 0, mesh.output
    assert_nothing_lost(mesh, 4)
    reports = read_trained_groups(mesh)
    both = [t for t in restored_tokens.values() if t.id in reports and t.length > t.prompt_length]
    assert both, "no trajectory of the first shard was trained"
    for t in both:
        assert t.length < len(reports[t.id]), "it was finished already"
        assert reports[t.id][: t.length].tolist() == t.tokens.tolist()


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has exited
        return b""


@pytest.mark.deep
def test_role_process_killed_during_loading_is_restarted(
    run: Callable[..., Run],
) -> None:
    mesh = run(budget__steps=2)
    killed: set[int] = set()
    for _ in range(3):

        def find_loading_trainer() -> int:
            """Return a trainer's process id from the machine: the mesh would report it a second
            later.
            """
            fresh = set(find_leftovers(mesh.directory / "mesh/settings.json")) - killed
            return next(
                (pid for pid in fresh if b"meshrl.services.trainer" in command_line(pid)), 0
            )

        pid = mesh.until("a role process that loads", find_loading_trainer)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    assert mesh.finish() == 0, mesh.output
    assert_nothing_lost(mesh, 2)
    reports = [fields["detail"] for fields in mesh.events("actual") if fields["role"] == "training"]
    assert any(detail.endswith("exited: signal 9") for detail in reports), reports


STEPS = 40  # they take seconds: Redis is killed by then


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_run_resumes_in_a_new_lineage_after_redis_lost_state(
    run: Callable[..., Run],
) -> None:
    # With this staleness, groups are in flight at every checkpoint.
    settings = {"training__checkpoint_every": 2, "algorithm__max_staleness": 3}
    mesh = run(budget__steps=STEPS, rollout__max_tokens=48, **settings)
    file = mesh.directory / "mesh/redis/appendonlydir/appendonly.aof.1.incr.aof"
    mesh.until("a step", lambda: mesh.version >= 2)
    shorter = file.stat().st_size
    mesh.until("a step that was recorded", lambda: len(mesh.events("step")) >= 4)
    redis = int(mesh.redis.info("server")["process_id"])
    os.kill(mesh.program.pid, signal.SIGSTOP)  # the launcher must not restart Redis before this
    os.kill(redis, signal.SIGKILL)
    os.truncate(file, shorter)
    os.kill(mesh.program.pid, signal.SIGCONT)

    assert mesh.finish() == 0, mesh.output
    assert "redis lost state" in mesh.output, mesh.output
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
