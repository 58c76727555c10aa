"""`meshrl sample`: what a prompt means, and what is said where there is no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.base.errors import ConfigError, NotFound
from meshrl.directory.target import run_in
from meshrl.run.talking import ModelChoice, asked, model_of, sample
from tests.unit.meshrl.run.conftest import written_run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mesh of whoever runs the tests is found."""
    monkeypatch.setenv("MESHRL_HOME", str(tmp_path / "home"))


def test_a_json_object_is_a_row_and_everything_else_a_prompt() -> None:
    texts = ["1+2?\n", '{"prompt": "a", "answer": 3}', "{not json}", '["a"]', " \n", " x"]
    assert [json.loads(line) for line in asked(texts)] == [
        {"prompt": "1+2?"},
        {"row": {"prompt": "a", "answer": 3}},
        {"prompt": "{not json}"},
        {"prompt": '["a"]'},
        {"prompt": " x"},
    ]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no run in"):
        sample(tmp_path / "nothing", "x", ModelChoice())


@pytest.mark.deep
def test_a_run_without_a_version_says_so(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run", [{"phase": "training", "error": ""}], [])
    with pytest.raises(NotFound, match=r"no model of .* yet: .* has no version\.") as refused:
        sample(run, "x", ModelChoice())
    assert "warm start" in refused.value.fix
    with pytest.raises(NotFound, match="no best version"):
        sample(run, "x", ModelChoice(best=True))
    with pytest.raises(ConfigError, match="two versions"):
        sample(run, "x", ModelChoice(step=3, best=True))


def test_the_model_of_a_run_that_is_over_is_its_own(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run", [{"phase": "finished", "error": ""}], [0.5])
    (run / "model").mkdir()
    (run / "model/config.json").write_text("{}")
    assert model_of(run_in(run), None, False, tmp_path) == run / "model"


def test_no_prompt_is_an_error(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run", [{"phase": "finished", "error": ""}], [0.5])
    found = CliRunner().invoke(app, ["sample", str(run), "-"], input="\n\n")
    assert isinstance(found.exception, ConfigError) and "no prompt" in str(found.exception)
