"""Engines with an interpreter of their own: where they are, and what an install leaves alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.commands import doctor, engines
from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.process.interpreters import home, interpreter
from tests.sglang.interpreter import python


def environment(place: Path, version: str) -> Path:
    """What a virtual environment with SGLang looks like from outside."""
    package = place / f"lib/python3.11/site-packages/sglang-{version}.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    (place / "bin").mkdir()
    interpreter(place).symlink_to(sys.executable)
    return place


def test_an_unknown_engine_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vllm"):
        engines.install("vllm", tmp_path)


def test_our_own_environment_is_never_installed_into() -> None:
    with pytest.raises(ConfigError, match="own environment"):
        engines.install("sglang", Path(sys.prefix))


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(ConfigError, match="not empty"):
        engines.install("sglang", tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_right_version_is_found_and_nothing_is_done(tmp_path: Path) -> None:
    place = environment(tmp_path / "sglang", engines.PACKAGES["sglang"])
    assert engines.install("sglang", place) == place / "bin/python"
    assert engines.installed(tmp_path, "sglang") == ""


@pytest.mark.deep
def test_it_is_looked_for_below_a_folder_of_the_users_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_ENGINES", str(tmp_path))
    assert home("sglang") == tmp_path / "sglang"
    lines = {line.what: line for line in doctor.examine()}
    assert lines["sglang"].level == doctor.NOTE and "engine install" in lines["sglang"].fix
    environment(home("sglang"), "0.5.23")
    lines = {line.what: line for line in doctor.examine()}
    assert lines["sglang"].level == doctor.OK and "0.5.23" in lines["sglang"].found


@pytest.mark.needs("sglang")
def test_the_command_prints_the_interpreter_of_the_sglang_that_is_there() -> None:
    answer = CliRunner().invoke(
        app, ["engine", "install", "sglang", "--dir", str(python().parents[1])]
    )
    assert answer.exit_code == 0 and answer.output.strip() == str(python())
