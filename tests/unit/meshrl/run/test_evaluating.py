"""What is evaluated on what: the rules before a mesh starts."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.run.evaluating import result_of


def said(*words: str) -> str:
    found = CliRunner().invoke(app, ["eval", *words])
    assert found.exit_code == 1
    return str(found.exception)


def test_what_is_no_model_is_said_in_one_line(job: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "neither a Hugging Face directory nor a run" in said(str(tmp_path / "empty"), str(job))
    (tmp_path / "empty/config.json").write_text("{}")
    assert "choose a version of a run" in said(str(tmp_path / "empty"), str(job), "--step", "2")


def test_the_first_evaluation_is_the_result(tmp_path: Path) -> None:
    assert result_of(tmp_path) is None
    fields = {"job": "x", "tag": "before", "figures": {"held_out.greedy": 0.5}, "failed": 1}
    rows = [{"kind": "phase", "fields": {}}, {"kind": "evaluation", "fields": fields}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert result_of(tmp_path) == {"figures": {"held_out.greedy": 0.5}, "failed": 1}
