"""Installation and documentation: `meshrl doctor`, engines, documents, the starter."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.commands import doctor, engines
from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import JobConfig
from meshrl.common.job.schema import JOB_SCHEMA
from meshrl.common.mesh.process.engine_environments import locate_environment, locate_python
from meshrl.job import job_reader
from meshrl.job.checks.host import devices
from meshrl.job.job_file import get_value
from meshrl.job_template.job_creation import (
    EXAMPLE_MODULES,
    GAME_DIR,
    GAME_FILES,
    RECIPE_MODULES,
)
from meshrl.launch.up_down import MESH_SCHEMA, MeshFile
from tests.gpus.driver import Gpus
from tests.load import scaled
from tests.sglang.interpreter import python


def run_doctor(tmp_path: Path, path: str, **more: str) -> str:
    environment = {
        **os.environ,
        "PATH": path,
        "XDG_CACHE_HOME": str(tmp_path),
        "COLUMNS": "250",
    }
    environment |= more
    result = subprocess.run(
        [sys.executable, "-m", "meshrl", "doctor"],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        env=environment,
        check=False,
    )
    return result.stdout


def find_line(output: str, what: str) -> str:
    return next(line for line in output.splitlines() if line.split()[1:2] == [what])


@pytest.mark.rotating(4)
def test_doctor_reports_torch_operators_without_a_compiler(tmp_path: Path) -> None:
    output = run_doctor(tmp_path, str(tmp_path))
    for what, otherwise in (("engine", "torch eager"), ("training", "torch's operators")):
        line = find_line(output, what)
        assert line.startswith("note") and f"{otherwise}: no C++ compiler" in line


@pytest.mark.deep
@pytest.mark.needs("compiler")
def test_doctor_reports_native_operators_with_a_compiler(tmp_path: Path) -> None:
    output = run_doctor(tmp_path, os.environ["PATH"])
    for what in ("engine", "training"):
        line = find_line(output, what)
        assert line.startswith("ok") and "native, compiled at the first start" in line


@pytest.mark.deep
@pytest.mark.needs("compiler")
@pytest.mark.skipif(devices.is_torch_built_for_cuda(), reason="this torch has CUDA")
def test_doctor_lists_gpus_and_the_decoding_backend(tmp_path: Path, gpus: Gpus) -> None:
    output = run_doctor(tmp_path, str(tmp_path))
    assert "the NVIDIA driver is unavailable" in find_line(output, "gpu")
    gpus.gpu("GPU-a")
    output = run_doctor(tmp_path, str(tmp_path), **gpus.environment)
    listed, path = (line for line in output.splitlines() if line.split()[1:2] == ["gpu"])
    assert listed.startswith("ok") and "cuda:0 NVIDIA H100 (GPU-a)" in listed
    assert path.startswith("note") and 'mesh.device = "cuda" is rejected' in path
    assert "built without CUDA" in path


def test_doctor_reports_a_torch_that_fails_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    finding = next(line for line in doctor.run_checks() if line.subject == "torch")
    assert finding.level == doctor.ERROR
    assert finding.detail == "installed, but fails to load: libcudart.so.13: cannot open"


def test_required_subject_that_is_not_in_order_fails() -> None:
    fine = doctor.Finding(doctor.OK, "torch", "2.13.0")
    absent = doctor.Finding(doctor.NOTE, "sglang", "not installed", "Install it")
    levels = [
        [line.level for line in doctor.require_subjects(iter([fine, absent]), required)]
        for required in ((), ["torch"], ["sglang", "torch"], ["unknown"])
    ]
    ok, note, error = doctor.OK, doctor.NOTE, doctor.ERROR
    assert levels == [[ok, note], [ok, note], [ok, error], [ok, note, error]]
    *_, unknown = doctor.require_subjects(iter([fine, absent]), ["unknown"])
    assert unknown.fix == "Require one of: sglang, torch"


@pytest.mark.deep
def test_doctor_exits_with_an_error_without_a_required_engine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshrl", "doctor", "--require", "sglang"]
    environment = {**os.environ, "MESHRL_ENGINES": str(tmp_path), "COLUMNS": "250"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=scaled(60), env=environment
    )
    line = find_line(result.stdout, "sglang")
    assert result.returncode == 1 and line.startswith("bad") and "not installed" in line
    assert "meshrl engine install sglang" in result.stdout


ROOT = Path(__file__).parents[3]
KEYS = [key for key, kind in JOB_SCHEMA.types_by_key.items() if not is_dataclass(kind)]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("key", KEYS)
def test_every_job_key_is_documented_with_its_default(key: str) -> None:
    text = (ROOT / "docs/use/job-file.md").read_text()
    row = re.search(rf"^\| `{re.escape(key)}` \| `(.*?)` \|", text, re.MULTILINE)
    assert row, f"{key} is not in docs/use/job-file.md"
    assert row.group(1) == json.dumps(get_value(JobConfig(), key))


@pytest.mark.parametrize(
    "key", [k for k, kind in MESH_SCHEMA.types_by_key.items() if not is_dataclass(kind)]
)
def test_every_mesh_key_is_documented_with_its_default(key: str) -> None:
    text = (ROOT / "docs/operate/mesh.md").read_text()
    row = re.search(rf"^\| `{re.escape(key)}` \| `(.*?)` \|", text, re.MULTILINE)
    assert row and row.group(1) == json.dumps(get_value(MeshFile(), key))


def test_documented_keys_exist() -> None:
    rows = re.findall(
        r"^\| `([a-z_.]+)` \|", (ROOT / "docs/use/job-file.md").read_text(), re.MULTILINE
    )
    assert sorted(rows) == sorted(KEYS)


def test_readme_is_short_and_its_commands_exist() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    commands = {match for line in lines for match in re.findall(r"bin/meshrl (\w+)", line)}
    assert commands and commands <= set(cast(TyperGroup, typer.main.get_command(app)).commands)


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "CONTRIBUTING.md"),
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
    ],
)
def test_links_between_documents_resolve(name: str) -> None:
    path = ROOT / name
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), target
        assert not heading or heading in list_anchors(file), f"{target}#{heading}"


def list_anchors(document: Path) -> set[str]:
    """List the fragments that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headings}


def test_every_command_has_an_example() -> None:
    for command in app.registered_commands:
        assert command.callback is not None and "Example" in (command.callback.__doc__ or "")


def test_example_job_is_valid() -> None:
    result = CliRunner().invoke(app, ["run", str(ROOT / "examples/calculator.toml"), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "worker/w2" in result.output


def make_environment(place: Path, version: str) -> Path:
    """Make the files of a virtual environment with SGLang."""
    package = place / f"lib/python3.11/site-packages/sglang-{version}.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    (place / "bin").mkdir()
    locate_python(place).symlink_to(sys.executable)
    return place


def test_unknown_engine_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vllm"):
        engines.install_engine("vllm", tmp_path)


def test_own_environment_is_never_installed_into() -> None:
    with pytest.raises(ConfigError, match="own environment"):
        engines.install_engine("sglang", Path(sys.prefix))


def test_folder_with_other_files_is_not_installed_into(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(ConfigError, match="not empty"):
        engines.install_engine("sglang", tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_installed_version_is_found_and_not_reinstalled(tmp_path: Path) -> None:
    place = make_environment(tmp_path / "sglang", engines.ENGINE_VERSIONS["sglang"])
    assert engines.install_engine("sglang", place) == place / "bin/python"
    assert engines.find_installed_version(tmp_path, "sglang") == ""


@pytest.mark.deep
def test_engines_folder_is_configurable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHRL_ENGINES", str(tmp_path))
    assert locate_environment("sglang") == tmp_path / "sglang"
    lines = {line.subject: line for line in doctor.run_checks()}
    assert lines["sglang"].level == doctor.NOTE and "engine install" in lines["sglang"].fix
    make_environment(locate_environment("sglang"), "0.5.23")
    lines = {line.subject: line for line in doctor.run_checks()}
    assert lines["sglang"].level == doctor.OK and "0.5.23" in lines["sglang"].detail


@pytest.mark.needs("sglang")
def test_install_command_prints_the_interpreter() -> None:
    answer = CliRunner().invoke(
        app, ["engine", "install", "sglang", "--dir", str(python().parents[1])]
    )
    assert answer.exit_code == 0 and answer.output.strip() == str(python())


BUILT = {".pyc", ".pyi"}
INSTALLED = ("meshrl", "services", "common", "kernels", "sim")


@pytest.mark.parametrize("package", INSTALLED)
def test_data_files_are_declared_as_package_data(package: str) -> None:
    """Check each file, because a missing one fails only at its first use."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    name = package if package == "meshrl" else f"meshrl.{package}"
    patterns = declared["package-data"].get(name, [])
    held = {path for pattern in patterns for path in (ROOT / package).glob(pattern)}
    files = {p for p in (ROOT / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    modules = {p for p in files if p.suffix == ".py" and (p.parent / "__init__.py").is_file()}
    assert sorted(map(str, files - modules - held)) == []


def run_init(directory: Path) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["init", str(directory)])
    return found.exit_code, found.output + str(found.exception or "")


def test_new_job_is_valid_and_named_by_its_directory(tmp_path: Path) -> None:
    code, said = run_init(tmp_path / "mine")
    assert code == 0 and f"meshrl run {tmp_path / 'mine/job.toml'}" in said
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == sorted(GAME_FILES)
    config, _ = job_reader.load_config(tmp_path / "mine/job.toml", [])
    assert config.name == "mine"


@pytest.mark.parametrize("example", EXAMPLE_MODULES)
def test_example_becomes_an_independent_job(tmp_path: Path, example: str) -> None:
    found = CliRunner().invoke(app, ["init", str(tmp_path / "own"), "--example", example])
    assert found.exit_code == 0 and f"meshrl run {tmp_path / 'own'}/{example}.toml" in found.output
    config, _ = job_reader.load_config(tmp_path / "own" / f"{example}.toml", [])
    assert config.name == "own"


def test_init_offers_every_example_and_recipe(tmp_path: Path) -> None:
    for directory, known in (("examples", EXAMPLE_MODULES), ("examples/recipes", RECIPE_MODULES)):
        assert {path.stem for path in (ROOT / directory).glob("*.toml")} == set(known)
    found = CliRunner().invoke(app, ["init", str(tmp_path / "own"), "--example", "mbpp"])
    assert found.exit_code == 0 and "own/mbpp.toml --dry-run" in found.output
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["mbpp.py", "mbpp.toml"]


def test_unknown_example_is_reported_with_the_known_ones(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["init", str(tmp_path / "own"), "--example", "chess"])
    assert found.exit_code == 1 and "calculator, chat, code" in str(found.exception)
    assert not (tmp_path / "own").exists()


def test_existing_directory_and_invalid_name_are_rejected(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes").write_text("mine")
    code, said = run_init(taken)
    assert code == 1 and "is there already" in said
    assert [p.name for p in taken.iterdir()] == ["notes"]
    code, said = run_init(tmp_path / "a b")
    assert code == 1 and "cannot be the name of a job" in said and not (tmp_path / "a b").exists()
    (tmp_path / "file").write_text("")
    code, said = run_init(tmp_path / "file/job")
    assert code == 1 and "cannot be written" in said


def test_template_script_writes_the_shipped_files(tmp_path: Path) -> None:
    shutil.copy(GAME_DIR / "game.py", tmp_path)
    runpy.run_path(str(tmp_path / "game.py"), run_name="__main__")
    for name in ("train.jsonl", "held_out.jsonl", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (GAME_DIR / name).read_bytes()


def test_game_reward_favours_halving_and_sensible_guesses() -> None:
    code = runpy.run_path(str(GAME_DIR / "game.py"))
    rows = [json.loads(line) for line in (GAME_DIR / "train.jsonl").read_text().splitlines()]
    for row in rows:
        turns, game = play(code, row, "halve")
        assert code["reward"](row, turns) == 1.0
        assert game["done"]
    far = next(row for row in rows if row["hidden"] == row["prompt"][0] and row["prompt"][2] == "l")
    turns, _ = play(code, far, "l")
    assert code["reward"](far, turns) == pytest.approx(0.1), "the same letter again has no sense"
    assert code["reward"](far, [{"role": "model", "text": "<"}]) == 0.0


def play(
    code: dict[str, object], row: dict[str, str], how: str
) -> tuple[list[dict[str, str]], Any]:
    """Play a game and return its turns and outcome, by halving or with one repeated letter."""
    game = code["game"]()  # type: ignore[operator]
    prompt = game.open(row)
    low, high = ord(prompt[0]), ord(prompt[2])
    turns: list[dict[str, str]] = []
    while True:
        guess = chr((low + high) // 2) if how == "halve" else how
        turns.append({"role": "model", "text": guess})
        said = game.step(guess)
        if said.get("done"):
            return turns, said
        low, high = (low, ord(guess) - 1) if said["append"] == "<" else (ord(guess) + 1, high)


@pytest.mark.parametrize("file", ["job.toml", "game.py"])
def test_first_job_document_shows_the_complete_files(file: str) -> None:
    text = (ROOT / "docs/use/first-job.md").read_text()
    language = "toml" if file.endswith("toml") else "python"
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = (GAME_DIR / file).read_text()
    for block in blocks:
        assert block in rest, f"not in {file}:\n{block}"
        rest = rest.replace(block, "", 1)
    assert blocks and not rest.strip(), f"not in the document:\n{rest}"
