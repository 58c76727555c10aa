"""What the job's modules do at import, and offer, is found in a process of their own."""

from __future__ import annotations

import os
import textwrap
from functools import partial
from pathlib import Path

import pytest

from common.mesh.process.handle import usage_of
from meshrl.job.checks.machine import modules
from tests.load import scaled
from tests.unit.meshrl.job.machine.conftest import read, refusal

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


def said(place: Path, *overrides: str) -> str:
    found = refusal(modules.imported, place, *overrides)
    assert "meshrl-trial" not in found  # the author's own files are named, not their copies
    return found


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nothing_of_that_name\n\ndef score(row, turns): ...", "No module named"),
        ("import tally\nfrom tally import MORE\n\ndef score(row, turns): ...", "line 2"),
        ("def score(row, turns):\n    return 1\n\nx = 1 / 0", "ZeroDivisionError"),
        ("def score(row):\n    return 1", "cannot be called as a reward is"),
        ("def score(row, turns, more):\n    return 1", "def score(row, turns):"),
        ("async def score(row, turns):\n    return 1", "is async"),
        ("score = 3", "is a int, not a function"),
        ("import sys\n\ndef score(row, turns): ...\n\nsys.exit(3)", "SystemExit: 3"),
        ("import os\n\ndef score(row, turns): ...\n\nprint('going')\nos._exit(5)", "status 5"),
        ("import os\n\ndef score(row, turns): ...\n\nos.abort()", "SIGABRT"),
        ("def score(row, turns): ...\n\nopen(__file__[:-10] + 'held.jsonl')", "absolute"),
    ],
)  # fmt: skip
def test_a_module_that_does_not_work_is_named_with_its_line(
    place: Path, text: str, says: str
) -> None:
    write(place, "rewards.py", text)
    found = said(place)
    assert found.startswith(f"{place}, line 13: reward.use: ") and says in found
    if "process" not in found and "is a int" not in found:
        assert f"({place.parent}/rewards.py, line " in found


def test_modules_that_work_are_accepted(place: Path) -> None:
    write(place, "rewards.py", "import rooms\n\ndef score(row, turns): ...\n")
    write(place, "rooms.py", ROOM)
    modules.imported(read(place, "environment.use=rooms:room"))


def test_an_import_that_does_not_end_is_killed_and_says_where_it_was(place: Path) -> None:
    write(
        place,
        "rewards.py",
        "import time\n\ndef score(row, turns): ...\n\nwhile True:\n    time.sleep(0.01)\n",
    )
    import_s = round(scaled(1.5), 1)  # in which its process starts
    found = refusal(partial(modules.imported, import_s=import_s), place)
    assert f"importing rewards:score did not end within {import_s:g} s" in found
    assert f"it is at {place.parent}/rewards.py, line " in found


def test_what_the_modules_print_and_start_is_not_the_command_lines(
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
    modules.imported(read(place))
    assert capfd.readouterr() == ("", "")
    own, *children = map(int, (place.parent / "child").read_text().split())
    assert own != os.getpid() and len(children) == 2
    assert not any(map(usage_of, children))


def test_an_environment_is_opened_on_the_first_row_of_each_dataset(place: Path) -> None:
    write(place, "rooms.py", ROOM)
    use = "environment.use=rooms:room"
    modules.imported(read(place, use))
    write(place, "held.jsonl", '{"question": "1"}\n')
    assert (
        "KeyError: 'prompt', of " in (found := said(place, use)) and "held.jsonl, line 1" in found
    )
    assert f"({place.parent}/rooms.py, line 3)" in found


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("def room():", "def room(row):", "cannot be called as an environment's factory is"),
        ("return Room()", "return None", "returned a NoneType without open()"),
        ("def step", "def move", "returned a Room without step()"),
        ('return row["prompt"]', "return 3", "open() returned int, not the prompt as str"),
        ('return row["prompt"]', "return [{}]", "Messages take environment.chat"),
        ('return row["prompt"]', "raise ValueError('no')", "ValueError: no"),
        ('return row["prompt"]', "return '1' * 64", "(64 tokens)"),
        ('return row["prompt"]', "return 'one'", "'one' does not encode"),
        ("return Room()", "raise RuntimeError('closed')", "RuntimeError: closed"),
    ],
)
def test_an_environment_that_does_not_open_is_said(
    place: Path, old: str, new: str, says: str
) -> None:
    assert old in ROOM
    write(place, "rooms.py", ROOM.replace(old, new))
    assert says in said(place, "environment.use=rooms:room")


def test_an_open_that_does_not_end_has_the_environments_deadline(place: Path) -> None:
    write(place, "rooms.py", ENDLESS)
    deadline_s = round(scaled(0.5), 1)  # in which its process comes to the loop
    found = said(place, "environment.use=rooms:room", f"environment.step_deadline_s={deadline_s:g}")
    assert "open() of " in found and f"did not end within {deadline_s:g} s" in found
    assert "rooms.py" in found
    assert found.startswith("--set environment.use=rooms:room")


def test_tools_and_demonstrations_are_called_as_they_will_be(place: Path) -> None:
    write(place, "more.py", "def tool(a, b): ...\n\ndef shown(random): ...\n")
    assert "called as a tool is" in said(place, 'environment.tools={x = "more:tool"}')
    assert "def shown(random, progress)" in said(place, "warm_start.demonstrations=more:shown")


@pytest.mark.parametrize(
    ("name", "whose"), [("queue", "the standard library"), ("common", "MeshRL")]
)
def test_a_module_with_the_name_of_another_is_refused(place: Path, name: str, whose: str) -> None:
    write(place, f"{name}.py", "def score(row, turns): ...\n")
    found = said(place, f"reward.use={name}:score")
    assert f"{place.parent}/{name}.py has the name of a module of {whose}" in found


def test_an_error_of_several_lines_is_told_in_one(place: Path) -> None:
    write(place, "rewards.py", "def score(row, turns): ...\n\nraise ValueError('a\\n  b\\n')\n")
    assert "ValueError: a / b (" in said(place)


def test_who_waits_for_an_import_is_told_where_it_is(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    quiet_s = scaled(0.7)
    text = f"import time\n\ntime.sleep({2 * quiet_s})\n\ndef score(row, turns): ...\n"
    write(place, "rewards.py", text)
    modules.imported(read(place), quiet_s=quiet_s)
    told = capfd.readouterr().err
    assert "importing rewards:score takes its time" in told
    assert f"it is at {place.parent}/rewards.py, line 3" in told and told.count("\n") == 1
