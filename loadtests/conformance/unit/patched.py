"""What a test patches: attributes, environment, the working directory."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "patched_attribute",
        """
class Clock:
    def now(self):
        raise NotImplementedError


clock = Clock()


def greeting():
    hour = clock.now()
    if not 0 <= hour < 24:
        raise ValueError(hour)
    return "Good morning" if hour < 12 else "Good evening" if hour >= 18 else "Hello"
""",
        """
import pytest
import solution


@pytest.mark.parametrize(
    "hour,text", [(0, "Good morning"), (12, "Hello"), (17, "Hello"), (18, "Good evening")]
)
def test_hours(monkeypatch, hour, text):
    monkeypatch.setattr(solution.clock, "now", lambda: hour)
    assert solution.greeting() == text


def test_bad(monkeypatch):
    monkeypatch.setattr(solution.clock, "now", lambda: 24)
    with pytest.raises(ValueError):
        solution.greeting()


def test_unpatched():
    with pytest.raises(NotImplementedError):
        solution.greeting()
""",
        ("hour < 12", "hour <= 12"),
        ("hour < 24", "hour <= 24"),
    ),
    unit(
        "patched_module_name",
        """
import random


def roll(sides=6):
    return random.randint(1, sides)


def roll_many(n, sides=6):
    return sorted((roll(sides) for _ in range(n)), reverse=True)
""",
        """
import solution


def test_sorted(monkeypatch):
    values = iter([2, 6, 1])
    monkeypatch.setattr(solution, "roll", lambda sides: next(values))
    assert solution.roll_many(3) == [6, 2, 1]


def test_sides(monkeypatch):
    seen = []
    monkeypatch.setattr(solution, "roll", lambda sides: seen.append(sides) or len(seen))
    assert solution.roll_many(2, sides=20) == [2, 1]
    assert seen == [20, 20]


def test_range():
    assert all(1 <= solution.roll(3) <= 3 for _ in range(50))
    assert solution.roll_many(0) == []
""",
        ("roll(sides) for", "roll(6) for"),
        (", reverse=True", ""),
    ),
    unit(
        "environment_flags",
        """
import os

TRUE = {"1", "true", "yes", "on"}


def flag(name, default=False):
    raw = os.getenv("APP_" + name.upper())
    if raw is None:
        return default
    return raw.strip().lower() in TRUE


def require(name):
    value = os.getenv("APP_" + name.upper())
    if not value:
        raise KeyError(f"APP_{name.upper()} is not set")
    return value
""",
        """
import pytest
from solution import flag, require


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("APP_DEBUG", raising=False)


@pytest.mark.parametrize("raw", ["1", "TRUE", " yes "])
def test_true(monkeypatch, raw):
    monkeypatch.setenv("APP_DEBUG", raw)
    assert flag("debug") is True


@pytest.mark.parametrize("raw", ["0", "", "off"])
def test_false(monkeypatch, raw):
    monkeypatch.setenv("APP_DEBUG", raw)
    assert flag("debug", default=True) is False


def test_default():
    assert flag("debug") is False
    assert flag("debug", True) is True


def test_require(monkeypatch):
    with pytest.raises(KeyError, match="APP_DEBUG is not set"):
        require("debug")
    monkeypatch.setenv("APP_DEBUG", "x")
    assert require("debug") == "x"
    monkeypatch.setenv("APP_DEBUG", "")
    with pytest.raises(KeyError):
        require("debug")
""",
        ("if raw is None:", "if not raw:"),
        (".strip()", ""),
    ),
    unit(
        "changed_directory",
        """
import os


def find_up(name, start=None):
    place = os.path.abspath(start or os.getcwd())
    while True:
        candidate = os.path.join(place, name)
        if os.path.exists(candidate):
            return candidate
        parent = os.path.dirname(place)
        if parent == place:
            return None
        place = parent
""",
        """
from solution import find_up


def test_here(tmp_path, monkeypatch):
    (tmp_path / "mark").write_text("")
    monkeypatch.chdir(tmp_path)
    assert find_up("mark") == str(tmp_path / "mark")


def test_above(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "a" / "mark").mkdir()
    assert find_up("mark", str(deep)) == str(tmp_path / "a" / "mark")


def test_nearest(tmp_path):
    deep = tmp_path / "a"
    deep.mkdir()
    (tmp_path / "mark").touch()
    (deep / "mark").touch()
    assert find_up("mark", deep) == str(deep / "mark")


def test_none(tmp_path):
    assert find_up("no-such-file-anywhere", tmp_path) is None
""",
        ("os.path.exists(candidate)", "os.path.isfile(candidate)"),
        ("start or os.getcwd()", "start or os.sep"),
    ),
    unit(
        "table_output",
        """
import sys


def show(rows, headers=(), file=None):
    rows = [[str(cell) for cell in row] for row in rows]
    every = ([list(headers)] if headers else []) + rows
    if not every:
        return 0
    widths = [max(len(row[i]) for row in every) for i in range(len(every[0]))]
    for row in every:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths))
        print(line.rstrip(), file=file or sys.stdout)
    return len(rows)
""",
        """
import io

from solution import show


def test_columns(capsys):
    assert show([("a", 1), ("long", 22)], headers=("k", "v")) == 2
    assert capsys.readouterr().out.splitlines() == ["k     v", "a     1", "long  22"]


def test_nothing(capsys):
    assert show([]) == 0
    assert capsys.readouterr().out == ""


def test_file():
    out = io.StringIO()
    show([["x"]], file=out)
    assert out.getvalue() == "x\\n"
""",
        ("line.rstrip()", "line"),
        ("return len(rows)", "return len(every)"),
    ),
    unit(
        "error_stream",
        """
import sys


def run(argv):
    if not argv:
        print("usage: run NUMBER...", file=sys.stderr)
        return 2
    try:
        print(sum(int(a) for a in argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
""",
        """
from solution import run


def test_sum(capsys):
    assert run(["1", "2"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("3\\n", "")


def test_usage(capsys):
    assert run([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage:")


def test_error(capsys):
    assert run(["x"]) == 1
    assert "error: invalid literal" in capsys.readouterr().err
""",
        ('print(f"error: {error}", file=sys.stderr)', 'print(f"error: {error}")'),
        ("return 2", "return 1"),
    ),
    unit(
        "main_exits",
        """
import sys


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if "--version" in argv:
        print("tool 1.4")
        sys.exit(0)
    if not argv:
        sys.exit("nothing to do")
    print(" ".join(reversed(argv)))
""",
        """
import pytest
from solution import main


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == "tool 1.4\\n"


def test_nothing():
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == "nothing to do"


def test_words(capsys):
    assert main(["a", "b"]) is None
    assert capsys.readouterr().out.strip() == "b a"
""",
        ("sys.exit(0)", "sys.exit(1)"),
        ('sys.exit("nothing to do")', "sys.exit(2)"),
    ),
]
