"""The figures of a mesh, from the rows of one moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshrl.common.mesh.process.supervision.ended import LastEnd
from meshrl.common.state.jobs import JobRow, Phase
from meshrl.common.state.pool.workers.rows import Gang, Resident, Role, WorkerRow
from meshrl.view.mesh.snapshot import MeshSnapshot
from meshrl.view.mesh.stalled import Stall
from meshrl.view.metrics.mesh_gauges import HeadSnapshot, families

NOW_MS = 1_000_000.0


def job(id: str, phase: Phase = Phase.TRAINING, **more: Any) -> JobRow:
    counts = dict.fromkeys(("opened", "trained", "filtered", "host_lost"), 0)
    row = {
        "document": {"budget": {"steps": 9}},
        "run_dir": "/runs/x",
        "lineage": 0,
        "version": 3,
        "manifest": "",
        "checkpoint": "",
        "steps_done": 3,
        "cursor": 0,
        "admitted": 0,
        "stale_requeued": 4,
        "typed_drops": 2,
        "error": "",
        **counts,
    }
    return JobRow(id=id, phase=phase, **{**row, **more})


def figures(
    hosts: dict[str, str] | None = None, stalls: Sequence[Stall] = (), **rows: Any
) -> dict[str, float]:
    """By name and label values, without `meshrl_`."""
    found = {}
    for family in families(HeadSnapshot(MeshSnapshot(now_ms=NOW_MS, **rows), hosts or {}, stalls)):
        for sample in family.samples:
            key = " ".join([sample.name.removeprefix("meshrl_"), *sample.labels.values()])
            assert key not in found
            found[key] = sample.value
    return found


def test_jobs_with_their_steps_phases_and_trajectories() -> None:
    row = {"committed_ms": 940_000, "reward": 0.5, "kl": float("nan"), "manifest": "m"}
    found = figures(jobs=[job("a"), job("b", Phase.FAILED)], steps={"a": [row]})
    assert found["job_steps a"] == 3 and found["job_steps_budget a"] == 9
    assert found["job_phase a training"] == found["job_phase b failed"] == 1
    assert found["job_trajectories a stale_requeued"] == 4
    assert found["job_trajectories b typed_drops"] == 2
    assert found["job_step_age_seconds a"] == 60 and "job_step_age_seconds b" not in found
    assert found["job_last_step a reward"] == 0.5
    assert not [
        name for name in found if name in ("job_last_step a kl", "job_last_step a manifest")
    ]


def test_a_job_that_waits_or_is_paused_is_held_and_has_no_age() -> None:
    rows = [job("w", held="waiting: 2 workers of 4"), job("p", held="paused: by hand")]
    found = figures(jobs=rows)
    assert found["job_held w waiting"] == found["job_held p paused"] == 1
    assert not [name for name in found if name.startswith("job_step_age")]


def test_the_age_begins_anew_when_a_job_goes_on_or_begins() -> None:
    steps = {"on": [{"committed_ms": 1_000}]}
    rows = [job("on", held_ms=990_000), job("new", steps_done=0, since_ms=970_000)]
    found = figures(jobs=rows, steps=steps)
    assert found["job_step_age_seconds on"] == 10 and found["job_step_age_seconds new"] == 30


def test_gangs_by_role_workers_and_hosts_by_state() -> None:
    both = (Resident("g0.0", "a", Role.ROLLOUT), Resident("g0.1", "a", Role.TRAINING))
    gangs = (Gang("g0", ("w0",), 1, both), Gang("g1", ("w1",), 1))
    workers = (
        WorkerRow("w0", "h", "cpu:0", 1, gang="g0"),
        WorkerRow("w1", "h", "cpu:1", 1),
        WorkerRow("w2", "i", "cpu:0", 1, alive=False),
    )
    found = figures({"h": "up", "i": "away"}, workers=workers, gangs=gangs)
    assert [found[f"gangs {r}"] for r in ("rollout", "training", "scoring", "idle")] == [1, 1, 0, 1]
    assert [found[f"workers {s}"] for s in ("busy", "idle", "away")] == [1, 1, 1]
    assert [found[f"hosts {s}"] for s in ("up", "away", "drained")] == [1, 1, 0]


def test_a_leader_stalls_and_ends() -> None:
    stalls = [Stall(w, "engine/0", "generate", 20.0, "") for w in ("rollout/a/0", "rollout/a/1")]
    ends = [LastEnd("engine/0", "a", -9, "signal 9", 0, 3, False)]
    found = figures(leader="planner/1", stalls=stalls, ended=ends)
    assert found["leader"] == 1 and found["stalls generate"] == 2
    assert found["process_ends engine/0 a"] == 3
    assert figures()["leader"] == 0
