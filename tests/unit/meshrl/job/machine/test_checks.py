"""`meshrl run`, --dry-run and `submit` say what is wrong at once, all of it, and leave nothing."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.base.errors import ConfigError
from meshrl.job import jobfile
from meshrl.job.checks.machine import all_checks as checks
from meshrl.job.toml.writing import to_toml
from meshrl.launch.checks import mesh_checks
from tests.unit.meshrl.job.machine.conftest import read

EXAMPLES = Path(__file__).parents[5] / "examples"
WRONG = ["--set=rollout.max_tokens=4096", "--set=mesh.bind=tcp://192.0.2.1:*"]


def invoke(*words: str) -> tuple[str, str, str]:
    """What a command that fails says, and what it printed."""
    result = CliRunner().invoke(app, words)
    return str(result.exception), result.stdout, result.stderr


@pytest.mark.parametrize("words", [["run"], ["run", "--dry-run"]])
def test_every_problem_is_said_at_once_and_nothing_is_left(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(place.parent)
    before = sorted(place.parent.rglob("*"))
    said, printed, _ = invoke(*words, str(place), *WRONG)
    assert "rollout.max_tokens = 4096 exceeds" in said
    assert "\nerror: --set mesh.bind" in said and said.count("\n") == 1
    assert printed == ""
    assert sorted(place.parent.rglob("*")) == before


def test_a_job_that_is_submitted_needs_no_place_to_listen(place: Path) -> None:
    job = read(place, "mesh.bind=tcp://192.0.2.1:*")
    checks.check(job)
    with pytest.raises(ConfigError, match="192"):
        mesh_checks.check(job)


def test_submit_checks_before_it_looks_for_a_mesh(place: Path) -> None:
    said, _, _ = invoke("submit", str(place), "--set=rollout.max_tokens=4096")
    assert "rollout.max_tokens = 4096 exceeds" in said


@pytest.mark.parametrize("name", ["calculator", "chat", "code"])
def test_a_dry_run_prints_a_job_file_that_is_the_same_job(name: str, tmp_path: Path) -> None:
    file = EXAMPLES / f"{name}.toml"
    config, _ = jobfile.load(file, [])
    text = to_toml(config.document())
    for module in EXAMPLES.glob("*.py"):
        (tmp_path / module.name).symlink_to(module)
    (tmp_path / "job.toml").write_text(text)
    again, _ = jobfile.load(tmp_path / "job.toml", [])
    assert again == config


def test_a_dry_run_prints_nothing_else_on_its_standard_output(place: Path) -> None:
    result = CliRunner().invoke(
        app, ["run", str(place), "--dry-run", "--set=rollout.max_tokens=64"]
    )
    assert result.exit_code == 0, result.output
    assert tomllib.loads(result.stdout)["rollout"]["max_tokens"] == 64
    assert "planner/0" in result.stderr and "planner/0" not in result.stdout
