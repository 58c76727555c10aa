"""Simulated workers that may vanish: availability, seeding windows, cost and figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.sim.cluster.arm_runner import ArmResult, run_arm
from meshrl.sim.cluster.model.availability import (
    SegmentTable,
    draw_availability,
    read_availability,
)
from meshrl.sim.cluster.sources.scenario import read_arms
from tests.unit.sim.cluster.command import run_command

SPOT = Path("sim/cluster/scenarios/spot.toml")
# a smaller job with the same ratio of rollout to training
SMALL = ["jobs.groups_per_step=16", "jobs.steps=3", "jobs.slots=16"]


@pytest.fixture
def run_small(tmp_path: Path) -> Callable[..., ArmResult]:
    """Return a function that runs the scenario without arms, with some changes."""
    path = tmp_path / "without_arms.toml"
    path.write_text(SPOT.read_text().split("[[arms]]")[0])

    def run(*changes: str) -> ArmResult:
        [arm] = read_arms(path, [*SMALL, *changes]).values()
        return run_arm(arm, tmp_path, {})

    return run


def test_segments_are_within_their_bounds_and_depend_only_on_their_table() -> None:
    for seed in range(20):
        table = SegmentTable(seed=seed, least=1, most=5, mean=3.0, change_s=50.0, burst=3)
        drawn = draw_availability(table)
        assert drawn == draw_availability(table)
        times, counts = zip(*drawn, strict=True)
        assert times[0] == 0 and list(times) == sorted(times) and times[-1] < table.seconds
        assert all(1 <= count <= 5 for count in counts) and len(set(counts)) > 1


def test_csv_of_availability_names_its_invalid_line(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("time_s,instances\n0,3\n60.5,1\n")
    assert read_availability(path) == [(0.0, 3), (60.5, 1)]
    for row in ("50,1", "90,-1", "90,x", "90"):
        path.write_text(f"time_s,instances\n0,3\n60,1\n{row}\n")
        with pytest.raises(ConfigError, match="line 4"):
            read_availability(path)
    path.write_text("time_s,instances\n")
    with pytest.raises(ConfigError, match="no rows"):
        read_availability(path)


def test_hosts_of_a_csv_vanish_and_return_and_only_used_ones_cost(
    tmp_path: Path, run_small: Callable[..., ArmResult]
) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("time_s,instances\n0,2\n40,0\n90,1\n")
    result = run_small(f"hosts.spot.availability={path.name}")
    [job] = result.cluster.jobs.values()
    assert job.training.is_finished
    counts = [spot for _, _, spot in result.cluster.costs]
    assert counts == [0, 4, 2, 0, 2], "two hosts vanish one after the other"
    assert result.figures["policy"].spot_workers < 4
    assert job.sampled_tokens == pytest.approx(job.shards[0].sampled_tokens)


def test_core_engines_stop_after_the_seeding_time_and_serve_alone_without_others(
    tmp_path: Path, run_small: Callable[..., ArmResult]
) -> None:
    (tmp_path / "none.csv").write_text("time_s,instances\n0,0\n")
    seeded, alone = run_small(), run_small("hosts.spot.availability=none.csv")
    steps = [next(iter(one.cluster.jobs.values())).window.history for one in (seeded, alone)]
    assert [remote for *_, remote in steps[0]] == [12, 12, 12]
    assert [remote for *_, remote in steps[1]] == [0, 0, 0]
    assert seeded.figures["policy"].step_s < alone.figures["policy"].step_s
    assert steps[0][-1][1] < steps[1][-1][1]


def test_migrated_trajectories_lose_no_tokens_and_recomputed_ones_do(
    run_small: Callable[..., ArmResult],
) -> None:
    changes = "jobs.steps=1", "failures=[{ host = 1, at_s = 60 }]"
    zero = "switches.rollout_s=0", "switches.training_s=0"
    moved, again = (
        run_small(*changes, *zero, f"jobs.offload.recompute={flag}") for flag in ("false", "true")
    )
    jobs = [next(iter(one.cluster.jobs.values())) for one in (moved, again)]
    assert jobs[0].training.step_tokens == pytest.approx(jobs[1].training.step_tokens)
    prompts = 16 * 8 * 200
    assert jobs[0].sampled_tokens == pytest.approx(jobs[0].training.step_tokens[-1] - prompts)
    assert jobs[1].sampled_tokens > jobs[0].sampled_tokens
    assert moved.figures["policy"].step_s < again.figures["policy"].step_s


def test_command_reports_the_means_of_segments(tmp_path: Path) -> None:
    whole = SPOT.read_text()
    head, *arms = whole.split("[[arms]]")
    kept = [arm for arm in arms if any(f'"{n}"' in arm for n in ("reserved", "spot"))]
    path = tmp_path / "small.toml"
    path.write_text("[[arms]]".join([head, *kept]).replace("[128, 256]", "[16]"))
    words = [word for change in SMALL[:2] for word in ("--set", change)]
    done = run_command(str(path), *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["throughput_ratio_segments"]) == 3
    assert found["throughput_ratio"] > 0 and "tokens_per_dollar_gain" in found


def test_requests_leave_a_host_at_the_notice_of_its_end(
    tmp_path: Path, run_small: Callable[..., ArmResult]
) -> None:
    (tmp_path / "ends.csv").write_text("time_s,instances\n0,3\n95,2\n")
    used = ["jobs.steps=1", "switches.rollout_s=0", "hosts.spot.availability=ends.csv"]
    tokens = []
    for notice_s in (0, 60):
        result = run_small(*used, f"hosts.spot.notice_s={notice_s}")
        [job] = result.cluster.jobs.values()
        assert job.training.is_finished
        tokens.append(job.training.step_tokens)
        job_engines = len(job.engines)
        assert job_engines == 10, "eight on the core's workers, and two"
    assert tokens[0] == pytest.approx(tokens[1])
