"""Errors of a job that cannot start, and effects of its modules at import."""

from __future__ import annotations

import os
import textwrap
import tomllib
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.process.child_handle import read_process_usage
from meshrl.job.checks.host import all_checks as checks
from meshrl.job.checks.host import module_imports
from meshrl.launch.checks import mesh_checks
from tests.load import scaled
from tests.unit.meshrl.job.machine.conftest import get_error, read

ROOM = """\
class Room:
    def open(self, row):
        return row["prompt"]

    def step(self, text):
        return {"done": True}

    def close(self):
        pass

def room():
    return Room()
"""
ENDLESS = "import time\n" + ROOM.replace(
    'return row["prompt"]', "while True: time.sleep(0.01)  # which uses no CPU"
)


def write(place: Path, name: str, text: str) -> None:
    (place.parent / name).write_text(textwrap.dedent(text))


def get_import_error(place: Path, *overrides: str) -> str:
    found = get_error(module_imports.check_imports, place, *overrides)
    assert "meshrl-trial" not in found  # errors name the author's own files, not their copies
    return found


def test_working_modules_are_accepted(place: Path) -> None:
    write(place, "rewards.py", "import rooms\n\ndef score(row, turns): ...\n")
    write(place, "rooms.py", ROOM)
    module_imports.check_imports(read(place, "environment.use=rooms:room"))


def test_hanging_import_is_killed_and_located(place: Path) -> None:
    write(
        place,
        "rewards.py",
        "import time\n\ndef score(row, turns): ...\n\nwhile True:\n    time.sleep(0.01)\n",
    )
    import_s = round(scaled(1.5), 1)  # includes the start of the process
    found = get_error(partial(module_imports.check_imports, import_timeout_s=import_s), place)
    assert f"importing rewards:score did not finish within {import_s:g} s" in found
    assert f"the process is at {place.parent}/rewards.py, line " in found


def test_output_and_children_of_modules_are_isolated(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(
        place,
        "rewards.py",
        f"""\
        import os, subprocess
        print("loud")
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        left = "/bin/sleep 600 > /dev/null & echo $!"
        other = subprocess.check_output(["env", "-i", "setsid", "sh", "-c", left], text=True)
        with open({str(place.parent / "child")!r}, "w") as file:
            file.write(f"{{os.getpid()}} {{child.pid}} {{other}}")
        def score(row, turns): ...
        """,
    )
    module_imports.check_imports(read(place))
    assert capfd.readouterr() == ("", "")
    own, *children = map(int, (place.parent / "child").read_text().split())
    assert own != os.getpid() and len(children) == 2
    assert not any(map(read_process_usage, children))


def test_environment_is_opened_on_the_first_row_of_each_dataset(place: Path) -> None:
    write(place, "rooms.py", ROOM)
    use = "environment.use=rooms:room"
    module_imports.check_imports(read(place, use))
    write(place, "held.jsonl", '{"question": "1"}\n')
    assert (
        "KeyError: 'prompt', for " in (found := get_import_error(place, use))
        and "held.jsonl, line 1" in found
    )
    assert f"({place.parent}/rooms.py, line 3)" in found


def test_hanging_open_is_stopped_by_the_step_deadline(place: Path) -> None:
    write(place, "rooms.py", ENDLESS)
    deadline_s = round(scaled(0.5), 1)  # includes the start of the process
    found = get_import_error(
        place, "environment.use=rooms:room", f"environment.step_deadline_s={deadline_s:g}"
    )
    assert "open() of " in found and f"did not finish within {deadline_s:g} s" in found
    assert "rooms.py" in found
    assert found.startswith("--set environment.use=rooms:room")


def test_slow_import_is_reported_with_its_location(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    quiet_s = scaled(0.7)
    text = f"import time\n\ntime.sleep({2 * quiet_s})\n\ndef score(row, turns): ...\n"
    write(place, "rewards.py", text)
    module_imports.check_imports(read(place), scaled(30.0), quiet_s)
    output = capfd.readouterr().err
    assert "importing rewards:score is still running" in output
    assert (
        f"the process is at {place.parent}/rewards.py, line 3" in output and output.count("\n") == 1
    )


EXAMPLES = Path(__file__).parents[5] / "examples"
WRONG = ["--set=rollout.max_tokens=4096", "--set=mesh.bind=tcp://192.0.2.1:*"]


def invoke(*words: str) -> tuple[str, str, str]:
    """Run a failing command and return its error and output."""
    result = CliRunner().invoke(app, words)
    return str(result.exception), result.stdout, result.stderr


@pytest.mark.parametrize("words", [["run"], ["run", "--dry-run"]])
def test_all_problems_are_reported_at_once_without_leftovers(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(place.parent)
    before = sorted(place.parent.rglob("*"))
    error, printed, _ = invoke(*words, str(place), *WRONG)
    assert "rollout.max_tokens = 4096 exceeds" in error
    assert "\nerror: --set mesh.bind" in error and error.count("\n") == 1
    assert printed == ""
    assert sorted(place.parent.rglob("*")) == before


def test_submitted_job_needs_no_listen_address(place: Path) -> None:
    job = read(place, "mesh.bind=tcp://192.0.2.1:*")
    checks.check_host(job)
    with pytest.raises(ConfigError, match="192"):
        mesh_checks.check_job_and_mesh(job)


def test_submit_checks_the_job_before_it_connects_to_a_mesh(place: Path) -> None:
    error, _, _ = invoke("submit", str(place), "--set=rollout.max_tokens=4096")
    assert "rollout.max_tokens = 4096 exceeds" in error


def test_dry_run_prints_only_the_job_on_stdout(place: Path) -> None:
    result = CliRunner().invoke(
        app, ["run", str(place), "--dry-run", "--set=rollout.max_tokens=64"]
    )
    assert result.exit_code == 0, result.output
    assert tomllib.loads(result.stdout)["rollout"]["max_tokens"] == 64
    assert "planner/0" in result.stderr and "planner/0" not in result.stdout
