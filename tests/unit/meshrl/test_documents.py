"""Documents say what is: every key with its default, every command of the README."""

from __future__ import annotations

import json
import re
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.job.config import JobConfig
from meshrl.common.job.schema import JOB
from meshrl.job.loaded import at
from meshrl.launch.up_down import MESH, MeshFile

ROOT = Path(__file__).parents[3]
KEYS = [key for key, kind in JOB.kinds.items() if not is_dataclass(kind)]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_a_job_file_is_documented_with_its_default(key: str) -> None:
    text = (ROOT / "docs/job-file.md").read_text()
    row = re.search(rf"^\| `{re.escape(key)}` \| `(.*?)` \|", text, re.MULTILINE)
    assert row, f"{key} is not in docs/job-file.md"
    assert row.group(1) == json.dumps(at(JobConfig(), key))


@pytest.mark.parametrize("key", [k for k, kind in MESH.kinds.items() if not is_dataclass(kind)])
def test_every_key_of_a_mesh_toml_is_documented_with_its_default(key: str) -> None:
    text = (ROOT / "docs/operations.md").read_text()
    row = re.search(rf"^\| `{re.escape(key)}` \| `(.*?)` \|", text, re.MULTILINE)
    assert row and row.group(1) == json.dumps(at(MeshFile(), key))


def test_no_document_names_a_key_that_is_not_there() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \|", (ROOT / "docs/job-file.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(KEYS)


def test_the_readme_is_short_and_names_commands_that_exist() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    commands = {match for line in lines for match in re.findall(r"bin/meshrl (\w+)", line)}
    assert commands
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    "name",
    ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))],
)
def test_links_between_documents_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), target
        assert not heading or heading in anchors(file), f"{target}#{heading}"


def anchors(document: Path) -> set[str]:
    """What links may say after `#`, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headings}


def test_every_command_shows_an_example() -> None:
    for command in app.registered_commands:
        assert command.callback is not None and "Example" in (command.callback.__doc__ or "")


def test_the_example_job_is_valid() -> None:
    result = CliRunner().invoke(app, ["run", str(ROOT / "examples/calculator.toml"), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "worker/w2" in result.output
