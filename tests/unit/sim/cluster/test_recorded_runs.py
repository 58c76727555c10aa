"""A run's directory becomes a scenario: its lengths, its tools, and how fast what was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import NotFound
from meshrl.common.base.random import Random
from meshrl.sim.cluster.sources.recorded import TRACE, recorded, written
from meshrl.sim.cluster.sources.scenario import read
from tests.unit.sim.cluster.command import ran

BASE_S, EACH_S, TOOL_S, STEP_S = 0.01, 0.002, 0.5, 20.0
ENGINES, GROUPS, SIZE, STEPS = 2, 4, 4, 12
DOCUMENT = {
    "mesh": {"device": "cpu", "workers": 3},
    "tracking": {"trace": 1.0},
    "algorithm": {"groups_per_step": GROUPS, "group_size": SIZE, "max_staleness": 2},
    "rollout": {"slots": 16, "tensor_parallel": [1]},
    "training": {"ranks": 1, "bin_tokens": 4096},
    "planner": {"moves": False},
}


def rows_of(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trajectory(random: Random, at: float, group: int, member: int) -> dict[str, Any]:
    """Two turns with a tool between them, of one that as many as are drawn are beside."""
    batch = random.randint(1, 8)
    turns = [random.randint(20, 60) for _ in range(2)]
    first, second = (1000 * tokens * (BASE_S + EACH_S * batch) for tokens in turns)
    return {
        "kind": "trajectory",
        "at": at,
        "group": group,
        "member": member,
        "version": 0,
        "prompt": 10,
        "tokens": 10 + sum(turns),
        "ending": "done",
        "training": True,
        "parts": ["open", 1.0, "decode", first, "tool", 1000 * TOOL_S, "decode", second],
        "beside": batch,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two engines, at which as many trajectories decode as each says."""
    folder, random = tmp_path / "run", Random(4)
    (folder / "trace").mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"job": "talk", "document": DOCUMENT}))
    found = []
    for number in range(GROUPS * STEPS):
        base = trajectory(random, 1000.0 + 50 * number, number, 0)
        # As many more are there that decode for as long, so that engines have `beside` each.
        more = ENGINES * base.pop("beside") - 1
        found += [base | {"member": n} for n in range(1 + more)]
    rows_of(folder / "trace" / "shard-0.jsonl", found)
    steps = [
        {
            "kind": "step",
            "at": 1000.0 + STEP_S * n,
            "step": n + 1,
            "tokens": 800,
            "parts": ["waiting", 15_000.0, "computing", 4000.0, "updating", 600.0, "telling", 40.0],
            "rounds": [0.0, 2500.0, 2500.0, 1500.0],
        }
        for n in range(STEPS)
    ]
    rows_of(folder / "trace" / "trainer.jsonl", steps)
    update = {"kind": "weights", "at": 1000.0, "version": 0, "parts": ["pull", 90.0, "pause", 30.0]}
    rows_of(folder / "trace" / "engine-g1.0.jsonl", [update])
    rows_of(folder / "metrics.jsonl", [])
    rows_of(folder / "events.jsonl", list(events()))
    return folder


def events() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for n, role in enumerate(["training", "rollout", "rollout"]):
        about = {"resident": f"g{n}.0", "gang": f"g{n}", "role": role, "job": "talk"}
        wish = about | {"workers": [f"w{n}"], "core": not n, "tier": "accelerator", "reason": "x"}
        wish |= {"from_role": "idle", "pinned": False, "generation": 1, "epoch": 1}
        found.append({"id": f"{n}-0", "ms": 900_000, "kind": "desired", "fields": wish})
        there = about | {"status": "ready", "tier": "accelerator"}
        took_ms = 50_000 if not n else 4000
        found.append({"id": f"{n}-1", "ms": 900_000 + took_ms, "kind": "actual", "fields": there})
    found.sort(key=lambda row: row["ms"])
    last = {"id": "9-9", "ms": 9_000_000, "kind": "phase", "fields": {"phase": "finished"}}
    return [*found, last]


def test_a_run_tells_how_fast_it_was(run: Path) -> None:
    found = recorded(run)
    (job,) = found.document["jobs"]
    assert job["measured"]["base_s"] == pytest.approx(BASE_S, rel=0.1)
    assert job["measured"]["sequence_s"] == pytest.approx(EACH_S, rel=0.1)
    assert job["measured"]["train_tokens_per_s"] == pytest.approx(800 / 4.0)
    assert job["measured"]["update_s"] == pytest.approx(0.64)
    assert job["pull_s"] == pytest.approx(0.03)
    assert found.step_s == pytest.approx(STEP_S)
    assert found.document["hosts"] == [{"kind": "CPU", "accelerators": 3}]
    assert found.document["switches"] == {"rollout_s": 4.0, "training_s": 4.0}, "no core's"


def test_its_trajectories_are_those_of_the_scenario(run: Path, tmp_path: Path) -> None:
    found = recorded(run)
    path = written(found, tmp_path / "made")
    assert len((tmp_path / "made" / TRACE).read_text().splitlines()) == len(found.trace)
    for row in found.trace:
        first, second = row["turns"]
        assert first["tool_s"] == pytest.approx(TOOL_S + 0.001) and second["tool_s"] == 0.0
        assert 40 <= first["tokens"] + second["tokens"] <= 120
    (arm,) = read(path, []).values()
    (scenario,) = arm.tries.values()
    assert scenario.jobs[0].measured.base_s == found.document["jobs"][0]["measured"]["base_s"]


def test_the_error_on_the_run_itself_is_told(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    said = ran(f"--from={run}", "--what-if=hosts.accelerators=6", f"--out={out}")
    assert said.returncode == 0, said.stderr
    told = json.loads(said.stdout.splitlines()[-1])
    assert told["run_step_s"] == STEP_S
    assert told["run_error"] == pytest.approx(told["as_it_is_step_s"] / STEP_S - 1, abs=1e-3)
    assert "the run itself: 20 s/step" in said.stdout
    assert (out / "scenario.toml").is_file() and (out / "index.html").is_file()


def test_a_run_without_traces_is_refused(run: Path) -> None:
    rows_of(run / "trace" / "shard-0.jsonl", [])
    with pytest.raises(NotFound, match="traces of 0 trajectories and 12 steps"):
        recorded(run)


def test_what_it_takes_on_other_accelerators_needs_the_profiles_of_both(run: Path) -> None:
    words = [f"--from={run}", "--set=hosts.kind=H100"]
    said = ran(*words, "--set=jobs.measured.kind=GPU")
    assert said.returncode == 2 and "jobs.measured.kind=H100" in said.stderr
    said = ran(*words, "--set=jobs.measured.kind=A100")
    assert said.returncode == 0, said.stderr
