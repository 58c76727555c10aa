"""Slurm scripts, checked by a shell and by `meshrl`'s parser; `make test-slurm` runs them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import typer

from meshrl.cli import app

SCRIPTS = sorted((Path(__file__).parents[3] / "compose" / "slurm").iterdir())


def list_options(command: str) -> set[str]:
    """Return the options of a `meshrl` command."""
    group = typer.main.get_command(app)
    return {name for one in group.commands[command].params for name in one.opts}  # type: ignore[attr-defined]


@pytest.mark.needs("shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_passes_shellcheck(script: Path) -> None:
    found = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
    assert found.stdout == ""


@pytest.mark.parametrize(("script", "command"), [("head", "up"), ("workers", "join")])
def test_scripts_use_existing_options(script: str, command: str) -> None:
    (path,) = (one for one in SCRIPTS if one.stem == script and one.suffix == ".sbatch")
    (call,) = re.findall(rf"meshrl {command}(?=[^`\n]*--)(.*?)&$", path.read_text(), re.S | re.M)
    given = set(re.findall(r"(?<=\s)--[a-z-]+", call))
    assert {"--foreground", "--root"} < given <= list_options(command)
