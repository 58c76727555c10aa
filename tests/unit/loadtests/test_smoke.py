"""Runs of every documented load test, checked for the keys of docs/develop/benchmarks.md."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from loadtests.measuring.entry import flat
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV
from tests.load import scaled
from tests.unit.loadtests.benchmarks_page import read_documented_keys
from tests.unit.loadtests.smoke_forms import LACKING, SMOKES, Smoke
from tests.unit.loadtests.test_history import make_events, make_valid_history, write

ROOT = Path(__file__).parents[3]
WITHIN_S = 100.0  # limit of the slowest form
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
UNSET = ("MESHRL_REDIS_URL",)  # set by tests; a load test has its own
# Load tests of the fork server, or of all processes of a mesh, start their own.
WITH_OWN_FORK_SERVER = ("loadtests.start", "loadtests.chaos", "loadtests.damage", "loadtests.doors")


def test_each_documented_command_has_a_smoke_form() -> None:
    formed = {smoke.command for smoke in SMOKES}
    assert formed == read_documented_keys().keys()
    assert LACKING.keys() <= formed


def test_smoke_forms_run_their_documented_commands() -> None:
    for smoke in SMOKES:
        assert smoke.form.split()[0] == smoke.command.split()[0]


@pytest.mark.parametrize("command", sorted({smoke.command for smoke in SMOKES}))
def test_each_documented_key_is_expected_of_a_form_or_listed_as_lacking(command: str) -> None:
    lacking = LACKING.get(command, {}).keys()
    wanted = {
        key for smoke in SMOKES if smoke.command == command for key in list_expected_keys(smoke)
    }
    assert wanted | lacking == read_documented_keys()[command]
    assert not wanted & lacking


def test_nested_figures_are_flattened_with_joined_names() -> None:
    nested = {"a": 1, "arm": {"s": 2.0, "of": {"x": [3]}}}
    assert flat(nested) == {"a": 1, "arm_s": 2.0, "arm_of_x": [3]}
    with pytest.raises(ValueError, match="arm_s"):
        flat({"arm_s": 1, "arm": {"s": 2}})


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "smoke",
    [
        pytest.param(smoke, id=smoke.form, marks=[pytest.mark.needs(name) for name in smoke.needs])
        for smoke in SMOKES
    ],
)
def test_load_test_prints_its_documented_keys(smoke: Smoke) -> None:
    with make_scratch_directory() as folder, prepare_words(smoke.form, folder) as words:
        found = run_and_parse(words, folder)
    missing = [
        key
        for key in list_expected_keys(smoke)
        if not any(fnmatchcase(name, key) for name in found)
    ]
    assert missing == []


def list_expected_keys(smoke: Smoke) -> frozenset[str]:
    """Return the documented keys that a form has to print."""
    lacking = LACKING.get(smoke.command, {}).keys()
    return frozenset(smoke.keys or read_documented_keys()[smoke.command] - lacking)


def run_and_parse(words: list[str], folder: Path) -> dict[str, Any]:
    """Return the last line of a load test, which must be a flat object.

    A load test may end with 1, as its figures are worth nothing at these sizes.
    """
    unset = (*UNSET, FORK_SERVER_ENV) if words[0].startswith(WITH_OWN_FORK_SERVER) else UNSET
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    run = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(WITHIN_S),
    )
    lines = run.stdout.splitlines()
    assert run.returncode in (0, 1) and lines and lines[-1].startswith("{"), run.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[-1])
    assert [key for key, value in found.items() if not is_plain(value)] == []
    return found


def is_plain(value: Any) -> bool:
    """Return whether a figure is a number, a string, a boolean, null or a list of these."""
    if isinstance(value, list):
        return all(is_plain(one) and not isinstance(one, list) for one in value)
    return value is None or isinstance(value, int | float | str)


@contextlib.contextmanager
def make_scratch_directory() -> Iterator[Path]:
    """Yield an empty directory whose path is short, as those of sockets have to be.

    Every user may look into it: `loadtests.doors` acts as another one.
    """
    with tempfile.TemporaryDirectory(prefix="smoke-", ignore_cleanup_errors=True) as made:
        Path(made).chmod(0o755)
        yield Path(made)


@contextlib.contextmanager
def prepare_words(form: str, folder: Path) -> Iterator[list[str]]:
    """Make what a form's placeholders stand for, and yield its words."""
    with contextlib.ExitStack() as stack:
        places = {"tmp": folder}
        if "{run}" in form:
            places["run"] = write(folder / "run", "j", make_events(make_valid_history(), "j"))
        if "{templates}" in form:
            places["templates"] = folder / "templates"
            places["templates"].mkdir()
            (places["templates"] / "plain.jinja").write_text(TEMPLATE)
        if "{mesh}" in form:
            places["mesh"] = stack.enter_context(run_listening_mesh(folder / "mesh"))
        yield form.format_map(places).split()


@contextlib.contextmanager
def run_listening_mesh(root: Path) -> Iterator[Path]:
    """Run a mesh of one worker that listens on loopback."""
    meshrl("up", "--root", str(root), "--workers", "1", "--listen", "127.0.0.1")
    try:
        yield root
    finally:
        meshrl("down", "--mesh", str(root))


def meshrl(*words: str) -> None:
    """Run a command of `meshrl`; CalledProcessError if it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in UNSET}
    command = [sys.executable, "-m", "meshrl", *words]
    subprocess.run(command, env=environment, check=True, timeout=scaled(60.0))
