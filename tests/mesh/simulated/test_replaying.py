"""A seed gives one run, wherever it is run, and a run that fails says how to run it again."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.sim.mesh import __main__ as command_line
from meshrl.sim.mesh.running import MeshOutcome, MeshPlan, play

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
def test_a_seed_gives_one_run_again() -> None:
    plan = MeshPlan(11, "all", 0.002)
    assert play(plan).digest == play(plan).digest != play(replace(plan, seed=12)).digest


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_a_seed_gives_one_run_in_every_process(tmp_path: Path) -> None:
    one, two = tmp_path / "one.log", tmp_path / "elsewhere" / "two.log"
    two.parent.mkdir()
    assert digest_of("1", one) == digest_of("2", two)
    assert "start trainer/simulated" in one.read_text()


def test_a_run_that_fails_says_how_to_run_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    plan = MeshPlan(23, "kill,network", 0.25, workers=4, shards=2, ranks=2, pace=0.5, budget=4)
    assert (
        command_line.told([MeshOutcome(plan, violations=["gate: group 4"]), MeshOutcome(plan)]) == 1
    )
    said = capsys.readouterr().err
    assert "gate: group 4" in said
    line = next(line for line in said.splitlines() if line.startswith("again: "))
    words = shlex.split(line.removeprefix("again: python -m meshrl.sim.mesh"))
    assert command_line.plan_of(command_line.parser().parse_args(words)) == plan
