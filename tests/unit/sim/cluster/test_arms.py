"""Arms and training layouts of a simulated cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtests.layouts.cases import QWEN_14B
from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.accelerators import load_accelerators
from meshrl.services.planner.costs.training_costs import (
    TrainingLayout,
    TrainingWork,
    predict_step_s,
)
from meshrl.services.planner.layouts.layout_nodes import LayoutNode
from meshrl.sim.cluster.arm_runner import run_arm
from meshrl.sim.cluster.cluster_builder import build_cluster
from meshrl.sim.cluster.job_figures import JobFigures, compute_ratios, format_table
from meshrl.sim.cluster.model.cluster import SimCluster
from meshrl.sim.cluster.sources.scenario import Arm, apply_change, expand_choices, read_arms
from meshrl.sim.cluster.training_candidates import TrainingCandidates, TrainingCapabilities
from tests.unit.sim.cluster.command import run_command

MODEL = """
seed = 3
[pool]
gangs = "network"
[[hosts]]
kind = "A100"
count = 2
accelerators = 8
[[jobs]]
name = "agent"
steps = 4
groups_per_step = 8
group_size = 8
ranks = 8
degrees = [1, 2, 4]
[jobs.planner]
moves = false
[jobs.model]
parameters = 1.54e9
layers = 28
hidden = 1536
heads = 12
kv_heads = 2
head_dim = 128
[jobs.workload]
prompt = 200
median = { first = 1500 }
sigma = { first = 0.7 }
longest = 8000
"""
WORK = TrainingWork(64, 64 * 2000.0, 64 * 2000.0**2)
NODES = [LayoutNode("A800", f"host{n}", 8) for n in range(4)] + [LayoutNode("H100", "host4", 8)]
DIMENSIONS = (1, 2, 4, 8)
SIMULATED = TrainingCapabilities(DIMENSIONS, DIMENSIONS, sharded=False)
TRAINS = TrainingCandidates(QWEN_14B, WORK, load_accelerators())


def arms(folder: Path, more: str) -> dict[str, Arm]:
    path = folder / "scenario.toml"
    path.write_text(MODEL + more)
    return read_arms(path, [])


def test_best_of_several_settings_is_the_fastest(tmp_path: Path) -> None:
    each = "\n".join(
        f'[[arms]]\nname = "{n}"\nset = ["jobs.ranks={n}", "jobs.degrees=[1]"]' for n in (2, 8, 14)
    )
    more = f"""{each}
[[arms]]
name = "best"
set = ["jobs.degrees=[1]"]
best = ["jobs.ranks=[2, 8, 14]"]
[[arms]]
name = "oracle"
set = ["jobs.degrees=[1]"]
best = ["jobs.ranks=[2, 8, 14]"]
stretches = 3
"""
    known: dict[str, SimCluster] = {}
    results = {name: run_arm(arm, tmp_path, known) for name, arm in arms(tmp_path, more).items()}
    takes_s = {name: one.figures["agent"].step_s for name, one in results.items()}
    assert takes_s["best"] == min(takes_s[n] for n in ("2", "8", "14"))
    assert (
        results["best"].best_settings
        == f"jobs.ranks={min(('2', '8', '14'), key=takes_s.__getitem__)}"
    )
    assert takes_s["oracle"] <= takes_s["best"], "it changes along the run"
    assert len(known) == 3, "none runs twice"


def test_planned_layout_uses_every_accelerator(tmp_path: Path) -> None:
    (arm,) = arms(tmp_path, "").values()
    (scenario,) = arm.scenarios.values()
    for plan in ("uniform", "mixed"):
        jobs = [replace(scenario.jobs[0], plan=plan)]
        spec = build_cluster(replace(scenario, jobs=jobs), tmp_path).jobs["agent"].spec
        used = spec.requirements.ranks + sum(spec.initial_tensor_parallel_sizes)
        assert 16 - max(spec.initial_tensor_parallel_sizes) < used <= 16
        assert set(spec.initial_tensor_parallel_sizes) <= {1, 2, 4}
        if plan == "uniform":
            assert len(
                set(spec.initial_tensor_parallel_sizes)
            ) == 1 and spec.requirements.tensor_parallel == tuple(
                set(spec.initial_tensor_parallel_sizes)
            )


def test_initial_engines_follow_the_plan(tmp_path: Path) -> None:
    (arm,) = arms(tmp_path, "").values()
    (scenario,) = arm.scenarios.values()
    cluster = build_cluster(
        replace(scenario, jobs=[replace(scenario.jobs[0], plan="mixed")]), tmp_path
    )
    cluster.run(scenario.until_s)
    (job,) = cluster.jobs.values()
    degrees = sorted((engine.tensor_parallel_size for engine in job.engines), reverse=True)
    assert job.training.is_finished and tuple(degrees) == job.spec.initial_tensor_parallel_sizes


def test_colocated_job_alternates_rollout_and_training(tmp_path: Path) -> None:
    (arm,) = arms(tmp_path, "").values()
    (scenario,) = arm.scenarios.values()
    alone = replace(scenario.jobs[0], colocated=True)
    cluster = build_cluster(replace(scenario, jobs=[alone]), tmp_path)
    cluster.run(scenario.until_s)
    (job,) = cluster.jobs.values()
    assert job.training.is_finished and job.training.requeued_trajectories == 0
    assert sum(engine.tensor_parallel_size for engine in job.engines) == 16
    assert job.training.work.wait_s + job.training.work.busy_s == pytest.approx(
        job.training.step_ends_s[-1], rel=0.01
    )
    two = replace(scenario, jobs=[alone, scenario.jobs[0]])
    with pytest.raises(ConfigError, match="all accelerators"):
        build_cluster(two, tmp_path)


def test_core_larger_than_memory_is_rejected(tmp_path: Path) -> None:
    (arm,) = arms(tmp_path, "").values()
    (scenario,) = arm.scenarios.values()
    large = replace(
        scenario.jobs[0], ranks=1, model=replace(scenario.jobs[0].model, parameters=30e9)
    )
    with pytest.raises(ConfigError, match="lacks memory for its states"):
        build_cluster(replace(scenario, jobs=[large]), tmp_path)


def test_worker_count_of_a_kind_fills_whole_hosts() -> None:
    document: dict[str, Any] = {"hosts": [{"kind": "A100", "count": 2, "accelerators": 4}]}
    apply_change(document, "workers.a100=12")
    assert document["hosts"] == [{"kind": "A100", "count": 3, "accelerators": 4}]
    apply_change(document, "workers.h100=16")
    assert document["hosts"][1] == {"kind": "H100", "count": 2, "accelerators": 8}
    apply_change(document, "workers.a100=0")
    assert document["hosts"][0]["count"] == 0
    for wrong in ("workers.a100=6", "workers.a100=many", "workers.h100=-8"):
        with pytest.raises(ConfigError, match=r"whole hosts|number"):
            apply_change(document, wrong)


def figures(trained: float) -> dict[str, JobFigures]:
    return {"job": JobFigures(4, 40.0, 10.0, 5.0, trained, 0.5, 0, 0, 0, 0)}


def test_ladder_is_compared_with_the_papers() -> None:
    here = {"other": figures(50.0), "base": figures(100.0), "first": figures(110.0)}
    told = compute_ratios(here, {"base": 1.0, "first": 1.2, "other": 0.0}, {"other": "over_other"})
    assert told["ladder"] == [1.0, 1.1] and told["ladder_paper"] == [1.0, 1.2]
    assert told["ladder_off"] == pytest.approx(1 - 1.1 / 1.2, abs=1e-4)
    assert told["over_other"] == 2.2
    assert "paper" in format_table(here, {"base": 1.0}) and "paper" not in format_table(here, {})


@pytest.mark.parametrize("text", ["jobs.ranks", "jobs.ranks=", "jobs.ranks=8", "jobs.ranks=[]"])
def test_choice_without_values_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"best|values|VALUE"):
        expand_choices(text)


def test_ratios_are_medians_over_seeds(tmp_path: Path) -> None:
    more = """
[[arms]]
name = "even"
set = ["jobs.degrees=[1]"]
ratio = "over_even"
[[arms]]
name = "other"
set = ["jobs.degrees=[1]", "jobs.ranks=4"]
"""
    path = tmp_path / "scenario.toml"
    path.write_text(MODEL.replace("seed = 3", "seed = 3\nseeds = 3") + more)
    result = run_command(str(path))
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    values = document["over_even_seeds"]
    assert len(set(values)) == 3 and document["over_even"] == sorted(values)[1]
    first = document["other_trained_per_s"] / document["even_trained_per_s"]
    assert values[0] == pytest.approx(first, abs=1e-3)


def test_replica_counts_are_limited_by_memory() -> None:
    found = TRAINS.list_candidates(NODES)
    assert {(way.layout.tensor_parallel, way.layout.pipeline_parallel) for way in found} == {(1, 1)}
    of = {
        kind: {w.layout.data_parallel for w in found if w.layout.kind == kind}
        for kind in load_accelerators()
    }
    # 16 bytes for each of 14.8e9 parameters need more than three times 79 GB
    assert of["A800"] == set(range(4, 33))
    assert of["H100"] == set(range(4, 9))
    assert not of["L40S"]


def test_core_size_follows_grain_and_job_limits() -> None:
    found = replace(
        TRAINS, capabilities=TrainingCapabilities(min_workers=6, max_workers=10)
    ).list_candidates(NODES)
    assert {way.layout.data_parallel for way in found} == set(range(6, 11))
    found = replace(TRAINS, capabilities=TrainingCapabilities(worker_multiple=8)).list_candidates(
        NODES
    )
    assert {way.layout.data_parallel for way in found} == {8, 16, 24, 32}


def test_simulated_cluster_trains_in_three_dimensions() -> None:
    found = replace(TRAINS, capabilities=SIMULATED).list_candidates(NODES)
    layouts = {way.layout for way in found}
    assert TrainingLayout("A800", 2, 8, 2, False) in layouts
    assert TrainingLayout("H100", 1, 4, 2, False) in layouts
    for layout in layouts:
        assert layout.workers <= (32 if layout.kind == "A800" else 8)
        assert layout.tensor_parallel in (1, 2, 4, 8)
        assert layout.pipeline_parallel in (1, 2, 4, 8)
    assert {layout.pipeline_parallel for layout in layouts} == {1, 2, 4, 8}


def test_tensor_parallelism_stays_in_a_node_and_idle_pipelines_are_excluded() -> None:
    found = replace(TRAINS, capabilities=SIMULATED).list_candidates(
        [LayoutNode("A800", f"host{n}", 5) for n in range(8)]
    )
    assert max(way.layout.tensor_parallel for way in found) == 4
    found = replace(
        TRAINS, capabilities=SIMULATED, work=replace(WORK, sequences=4)
    ).list_candidates(NODES)
    assert found
    assert all(
        way.layout.pipeline_parallel - 1 <= max(1, 4 // way.layout.data_parallel) for way in found
    )


def test_candidate_times_match_the_cost_model() -> None:
    for way in TRAINS.list_candidates(NODES):
        assert way.train_s == predict_step_s(
            QWEN_14B, load_accelerators()[way.layout.kind], way.layout, WORK
        )
