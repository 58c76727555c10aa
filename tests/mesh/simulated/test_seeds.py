"""Whole meshes under random faults: every invariant holds, and a seed reproduces its run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import Fenced
from meshrl.common.state import events, jobs, leader
from meshrl.common.state.pool.scheduling.decisions import DissolveGang, Rationale
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.sim.mesh import __main__ as command_line
from meshrl.sim.mesh.job.job_setup import JOB_NAME
from meshrl.sim.mesh.runtime.virtual_mesh import VirtualMesh, VirtualMeshSize
from meshrl.sim.mesh.seed_runner import MeshOutcome, MeshPlan, run_plan
from tests.mesh.simulated.virtual_meshes import check_account, mesh_story

FAULTS = "all"
SEEDS = 100
PARTS = 10  # ten seeds per day
HOURS = 18 / 3600  # duration of faults; a run takes a minute of virtual time in total
# Redis' clock goes back during the lease of an engine that a power failure killed: the lease
# outlasts a mesh that fails at once.
CLOCK = 30
PACE = 0.5  # several kinds of faults in each of them


@pytest.mark.timeout(300)
@pytest.mark.rotating(PARTS)
@pytest.mark.parametrize("seed", [SEEDS if seed == CLOCK else seed for seed in range(SEEDS)])
def test_no_trajectory_is_lost_under_random_faults(seed: int) -> None:
    budget = 2 if 50 <= seed < SEEDS else 1
    plan = MeshPlan(seed, FAULTS, HOURS, pace=PACE, budget=budget)
    outcome = run_plan(plan)
    assert not outcome.violations, f"{outcome.violations}; again: {plan.replay_command}"


@pytest.mark.timeout(120)
@pytest.mark.rotating(PARTS)
@pytest.mark.parametrize("seed", range(200, 220))
def test_steps_are_strictly_on_policy_under_random_faults(seed: int) -> None:
    seeds_steps = seed % 2 == 1  # engines on the core's workers, too
    plan = MeshPlan(seed, FAULTS, HOURS, pace=PACE, budget=3, staleness=0)
    if seeds_steps:
        plan = replace(plan, workers=3, colocated=True, budget=4)
    outcome = run_plan(plan)
    assert not outcome.violations, f"{outcome.violations}; again: {plan.replay_command}"


@pytest.mark.rotating(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("workers", "shards", "ranks"), [(4, 2, 1), (3, 1, 2)])
def test_no_trajectory_is_lost_in_larger_meshes(workers: int, shards: int, ranks: int) -> None:
    plan = MeshPlan(7, FAULTS, 30 / 3600, workers, shards, ranks, budget=1)
    outcome = run_plan(plan)
    assert not outcome.violations, f"{outcome.violations}; again: {plan.replay_command}"


HOUR_S = 3600.0
LEASE_S = 6.0
STEPS = 10_000  # more than in an hour


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "whole_s", [HOUR_S / 30, pytest.param(HOUR_S, marks=pytest.mark.deep)], ids=["minutes", "hour"]
)
@mesh_story(VirtualMeshSize(workers=3, steps=STEPS))
async def test_no_trajectory_is_lost_with_a_stopped_leader(
    world: VirtualMesh, record_property: Any, whole_s: float
) -> None:
    clock, state = world.clock, world.state
    await clock.sleep(whole_s / 2)
    owner, token = await leader.read_leader(state, "planner")
    name = owner.partition("#")[0]
    before = await jobs.read_job(state, JOB_NAME)
    next(p for p in world.machine.live_processes if p.name == name).stop()
    stopped = clock.monotonic()
    while (await leader.read_leader(state, "planner"))[1] in (0, token):
        assert clock.monotonic() - stopped < 10 * LEASE_S, "no standby took over"
        await clock.sleep(0.1)
    record_property("takeover_s", clock.monotonic() - stopped)
    with pytest.raises(Fenced):
        await pool.write_decisions(
            state, token, "late", [DissolveGang("g0", Rationale("a late one"))], None
        )
    await clock.sleep(whole_s - clock.monotonic())
    assert (await leader.read_leader(state, "planner"))[0] != owner
    least = 3 if whole_s < HOUR_S else 100  # steps of half the time
    assert (await jobs.read_job(state, JOB_NAME)).version > before.version > least
    assert all(gang.is_reconciled for gang in await pool.read_gangs(state))
    counted, _ = await check_account(state)
    assert counted["typed_drops"] == 0 and counted["trained"] > 0
    moved = [e.fields for e in await events.read_all(state) if e.kind == "move"]
    assert moved and moved[0]["rule"] == "stage_time"
    assert moved[0]["train_s"] > moved[0]["rollout_s"]


ROOT = Path(__file__).parents[3]


def digest_of(hash_seed: str, log: Path) -> str:
    words = ["--seed", "11", "--faults", "all", "--hours", "0.01", "--log"]
    ran = subprocess.run(
        [sys.executable, "-m", "meshrl.sim.mesh", *words, str(log)],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
    )
    found: str = json.loads(ran.stdout)["digest"]
    return found


@pytest.mark.rotating(2)
def test_seed_reproduces_a_run() -> None:
    plan = MeshPlan(11, "all", 0.002, pace=0.3, budget=1)
    assert run_plan(plan).digest == run_plan(plan).digest != run_plan(replace(plan, seed=12)).digest


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_seed_reproduces_a_run_in_every_process(tmp_path: Path) -> None:
    one, two = tmp_path / "one.log", tmp_path / "elsewhere" / "two.log"
    two.parent.mkdir()
    assert digest_of("1", one) == digest_of("2", two)
    assert "start trainer/simulated" in one.read_text()


def test_failed_run_prints_the_command_to_repeat_it(capsys: pytest.CaptureFixture[str]) -> None:
    plan = MeshPlan(23, "kill,network", 0.25, workers=4, shards=2, ranks=2, pace=0.5, budget=4)
    assert (
        command_line.print_failures(
            [MeshOutcome(plan, violations=["gate: group 4"]), MeshOutcome(plan)]
        )
        == 1
    )
    output = capsys.readouterr().err
    assert "gate: group 4" in output
    line = next(line for line in output.splitlines() if line.startswith("replay: "))
    words = shlex.split(line.removeprefix("replay: python -m meshrl.sim.mesh"))
    assert command_line.parse_plan(command_line.build_parser().parse_args(words)) == plan
