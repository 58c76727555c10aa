"""Scenarios that people write or that recorded runs yield."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import ConfigError, NotFound
from meshrl.common.base.random import Random
from meshrl.sim.cluster.__main__ import SCENARIOS
from meshrl.sim.cluster.cluster_builder import build_cluster
from meshrl.sim.cluster.sources.recorded_run import TRACE_FILE, read_run, write_scenario
from meshrl.sim.cluster.sources.scenario import Arm, Scenario, apply_change, read_arms
from tests.load import scaled
from tests.unit.sim.cluster.command import run_command

SMALL = """
title = "a small one"
[[hosts]]
kind = "CPU"
accelerators = 4
[[jobs]]
name = "talk"
steps = 6
groups_per_step = 4
group_size = 4
emulate = "100/8/4000"
emulate_training = "100/50"
[jobs.workload]
prompt = 4
median = { first = 20 }
sigma = { first = 0.5 }
[[arms]]
name = "held"
set = ["jobs.planner.moves=false"]
[[arms]]
name = "planner"
"""
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


def write(folder: Path, text: str = SMALL) -> Path:
    path = folder / "scenario.toml"
    path.write_text(text)
    return path


def get_only_scenario(arm: Arm) -> Scenario:
    (scenario,) = arm.scenarios.values()
    return scenario


def test_old_names_of_renamed_keys_are_accepted(tmp_path: Path) -> None:
    old = SMALL.replace("emulate_training", "training_pace").replace("emulate", "pace")
    assert old != SMALL
    found = read_arms(write(tmp_path, old), ["pool.turns=false"])
    assert found == read_arms(write(tmp_path), ["pool.time_slicing=false"])


def test_arms_are_compared_with_the_first_one(tmp_path: Path) -> None:
    path = write(tmp_path)
    one, other = run_command(str(path)), run_command(str(path))
    assert one.returncode == 0, one.stderr
    document = json.loads(one.stdout.splitlines()[-1])
    assert document["held_faster"] == 1.0 and document["held_moves"] == 0
    assert document["held_steps"] == document["planner_steps"] == 6
    table = one.stdout.splitlines()[:-1]
    assert table == other.stdout.splitlines()[:-1], "a run is the same each time"
    assert [line.split()[0] for line in table] == ["arm", "held", "planner"]


def test_scenario_is_compared_with_its_change(tmp_path: Path) -> None:
    longer = SMALL.replace("steps = 6", "steps = 14")
    result = run_command(str(write(tmp_path, longer)), "--what-if", "hosts.cpu.accelerators=8")
    document = json.loads(result.stdout.splitlines()[-1])
    faster = document["planner_if_hosts.cpu.accelerators=8_faster"]
    assert faster > 1.0 and faster > document["planner_faster"]


@pytest.mark.rotating(2)
def test_shipped_scenarios_can_be_built() -> None:
    shipped = sorted(SCENARIOS.glob("*.toml"))
    assert shipped
    for path in shipped:
        arms = read_arms(path, [])
        for arm in arms.values():
            assert all(build_cluster(one, path.parent).jobs for one in arm.scenarios.values())
    assert shipped[0].stem in run_command().stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("steps = 6", "steps = 0 must be at least 1"),
        ('kind = "CPU"', "unknown key hosts[0].kinds"),
        ('emulate = "100/8/4000"', "there is no emulated engine speed 'fast'"),
        ("[jobs.workload]", "neither a model nor emulated speeds"),
    ],
)
def test_mistakes_in_a_scenario_are_named(tmp_path: Path, change: str, said: str) -> None:
    wrong = {
        "steps = 6": "steps = 0",
        'kind = "CPU"': 'kinds = "CPU"',
        'emulate = "100/8/4000"': 'emulate = "fast"',
        "[jobs.workload]": "[jobs.workload]",
    }[change]
    text = SMALL.replace(change, wrong, 1)
    if change == wrong:
        text = text.replace('emulate_training = "100/50"\n', "")
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        path = write(tmp_path, text)
        build_cluster(get_only_scenario(read_arms(path, [])["held"]), tmp_path).run(60.0)


def test_change_addresses_list_items_by_name_or_kind() -> None:
    document = {"hosts": [{"kind": "A100"}, {"kind": "H100", "count": 2}], "seed": 1}
    apply_change(document, "hosts.h100.count=16")
    assert [one.get("count") for one in document["hosts"]] == [None, 16]  # type: ignore[attr-defined]
    apply_change(document, "hosts.accelerators=4")
    assert [one["accelerators"] for one in document["hosts"]] == [4, 4]  # type: ignore[attr-defined]
    for wrong in ("seed", "hosts=3", "seed.more=1"):
        with pytest.raises(ConfigError):
            apply_change(document, wrong)


def test_trace_is_replayed_and_its_mistakes_name_their_line(tmp_path: Path) -> None:
    turns = [{"tokens": 30, "tool_s": 1.0, "answer": 5}, {"tokens": 20}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": 8, "turns": turns}) + "\n")
    text = SMALL.replace("prompt = 4", 'trace = "t.jsonl"')
    cluster = build_cluster(
        get_only_scenario(read_arms(write(tmp_path, text), [])["held"]), tmp_path
    )
    cluster.run(3600.0)
    job = cluster.jobs["talk"]
    assert job.training.is_finished and job.training.work.tokens == 6 * 16 * 63
    (tmp_path / "t.jsonl").write_text('{"turns": [{"tokens": 5}]}\n{"turns": [{"tokens": -1}]}\n')
    with pytest.raises(ConfigError, match="line 2"):
        build_cluster(get_only_scenario(read_arms(write(tmp_path, text), [])["held"]), tmp_path)


@pytest.mark.rotating(4)
def test_simulate_command_passes_options_on_and_draws_charts(tmp_path: Path) -> None:
    words = [str(write(tmp_path)), "--set", "jobs.steps=4", "--out", str(tmp_path / "plots")]
    told = [sys.executable, "-m", "meshrl", "simulate", *words]
    result = subprocess.run(told, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["held_steps"] == 4
    page = (tmp_path / "plots" / "index.html").read_text()
    assert "a small one" in page and page.count("<svg") == 3
    assert len(list((tmp_path / "plots").glob("*.png"))) == 3


def test_job_that_cannot_finish_is_reported(tmp_path: Path) -> None:
    result = run_command(str(write(tmp_path)), "--set", "jobs.ranks=9")
    assert result.returncode == 2 and "job talk" in result.stderr, result.stderr
    result = run_command(str(write(tmp_path)), "--set", "until_s=5")
    assert "held: talk completed 0 of 6 steps: until_s is 5" in result.stderr


def test_two_arms_of_one_name_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL.replace('name = "held"', 'name = "planner"'))
    with pytest.raises(ConfigError, match="two arms have the name planner"):
        read_arms(path, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothere"], "the scenario nothere does not exist. Pass a file, or one of agentic, drift"),
        (["--from=nowhere"], "nowhere is not a run directory"),
        (["agentic", "--from=nowhere"], "Pass SCENARIO or --from RUN"),
        (["agentic", "--set=jobs.plan=mixd"], "must be one of '', uniform, mixed"),
        (
            ["agentic", "--set=failures=[{host=7}]"],
            "host 7 does not exist: the scenario has 1 hosts",
        ),
        (["agentic", "--what-if=workers.a100=9"], "does not fill whole hosts of 8 accelerators"),
        (["agentic", "--set=jobs.measured.base_s=0.01"], "no training rate"),
        (
            ["agentic", "--set=jobs.ranks=1", "--set=jobs.model.parameters=4e11"],
            "lacks memory for its",
        ),
    ],
)
def test_command_mistakes_are_one_line_errors(words: list[str], said: str) -> None:
    found = run_command(*words)
    assert found.returncode == 2 and said in found.stderr, found.stderr
    assert "Traceback" not in found.stderr


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trajectory(random: Random, at: float, group: int, member: int) -> dict[str, Any]:
    """Make two turns with a tool call between them, among as many concurrent trajectories as
    drawn.
    """
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
    """Write the record of a run with two engines and known decode loads."""
    folder, random = tmp_path / "run", Random(4)
    (folder / "trace").mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"job": "talk", "document": DOCUMENT}))
    found = []
    for number in range(GROUPS * STEPS):
        base = trajectory(random, 1000.0 + 50 * number, number, 0)
        # As many other trajectories decode for as long, so that each engine decodes `beside` of
        # them.
        more = ENGINES * base.pop("beside") - 1
        found += [base | {"member": n} for n in range(1 + more)]
    write_json_lines(folder / "trace" / "shard-0.jsonl", found)
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
    write_json_lines(folder / "trace" / "trainer.jsonl", steps)
    update = {"kind": "weights", "at": 1000.0, "version": 0, "parts": ["pull", 90.0, "pause", 30.0]}
    write_json_lines(folder / "trace" / "engine-g1.0.jsonl", [update])
    write_json_lines(folder / "metrics.jsonl", [])
    write_json_lines(folder / "events.jsonl", list(events()))
    return folder


def events() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for n, role in enumerate(["training", "rollout", "rollout"]):
        about = {"resident": f"g{n}.0", "gang": f"g{n}", "role": role, "job": "talk"}
        desired = about | {
            "workers": [f"w{n}"],
            "core": not n,
            "tier": "accelerator",
            "reason": "x",
        }
        desired |= {"from_role": "idle", "pinned": False, "generation": 1, "epoch": 1}
        found.append({"id": f"{n}-0", "ms": 900_000, "kind": "desired", "fields": desired})
        there = about | {"status": "ready", "tier": "accelerator"}
        took_ms = 50_000 if not n else 4000
        found.append({"id": f"{n}-1", "ms": 900_000 + took_ms, "kind": "actual", "fields": there})
    found.sort(key=lambda row: row["ms"])
    last = {"id": "9-9", "ms": 9_000_000, "kind": "phase", "fields": {"phase": "finished"}}
    return [*found, last]


def test_recorded_run_yields_its_speeds(run: Path) -> None:
    found = read_run(run)
    (job,) = found.scenario["jobs"]
    assert job["measured"]["base_s"] == pytest.approx(BASE_S, rel=0.1)
    assert job["measured"]["sequence_s"] == pytest.approx(EACH_S, rel=0.1)
    assert job["measured"]["train_tokens_per_s"] == pytest.approx(800 / 4.0)
    assert job["measured"]["update_s"] == pytest.approx(0.64)
    assert job["pull_s"] == pytest.approx(0.03)
    assert found.step_s == pytest.approx(STEP_S)
    assert found.scenario["hosts"] == [{"kind": "CPU", "accelerators": 3}]
    assert found.scenario["switches"] == {"rollout_s": 4.0, "training_s": 4.0}, "no core's"


def test_recorded_trajectories_become_the_scenarios_trace(run: Path, tmp_path: Path) -> None:
    found = read_run(run)
    path = write_scenario(found, tmp_path / "made")
    assert len((tmp_path / "made" / TRACE_FILE).read_text().splitlines()) == len(found.trajectories)
    for row in found.trajectories:
        first, second = row["turns"]
        assert first["tool_s"] == pytest.approx(TOOL_S + 0.001) and second["tool_s"] == 0.0
        assert 40 <= first["tokens"] + second["tokens"] <= 120
    (arm,) = read_arms(path, []).values()
    (scenario,) = arm.scenarios.values()
    assert scenario.jobs[0].measured.base_s == found.scenario["jobs"][0]["measured"]["base_s"]


def test_error_of_the_simulated_run_is_reported(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    result = run_command(f"--from={run}", "--what-if=hosts.accelerators=6", f"--out={out}")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["run_step_s"] == STEP_S
    assert document["run_error"] == pytest.approx(
        document["as_it_is_step_s"] / STEP_S - 1, abs=1e-3
    )
    assert "measured run: 20 s/step" in result.stdout
    assert (out / "scenario.toml").is_file() and (out / "index.html").is_file()


def test_run_without_traces_is_rejected(run: Path) -> None:
    write_json_lines(run / "trace" / "shard-0.jsonl", [])
    with pytest.raises(NotFound, match="too few traces: 0 trajectories and 12 steps"):
        read_run(run)


def test_speed_on_other_accelerators_needs_both_profiles(run: Path) -> None:
    words = [f"--from={run}", "--set=hosts.kind=H100"]
    result = run_command(*words, "--set=jobs.measured.kind=GPU")
    assert result.returncode == 2 and "jobs.measured.kind=H100" in result.stderr
    result = run_command(*words, "--set=jobs.measured.kind=A100")
    assert result.returncode == 0, result.stderr
