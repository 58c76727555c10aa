"""Tests of the rows that no runner can grade by are named before a job starts, all of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl.job.checks.machine.rows import graded
from tests.unit.meshrl.job.machine.conftest import read, refusal

CODE = ["reward.use=code_tests"]
STDIN = [{"input": "1", "output": "2"}]
CALLS = {"function": "f", "cases": [{"args": [1], "output": 2}]}
PYTHON = "from solution import f\ndef test_f():\n    assert f(1) == 2\n"
LOGGED = "from solution import f\ndef test_f(caplog):\n    assert f(1) == 2\n"


def write(place: Path, *tests: Any, name: str = "train.jsonl") -> None:
    lines = [json.dumps({"prompt": str(i), "tests": of}) for i, of in enumerate(tests)]
    (place.parent / name).write_text("\n".join(lines) + "\n")


@pytest.fixture
def code(place: Path) -> Path:
    (place.parent / "held.jsonl").write_text(
        '{"prompt": "9+9", "tests": [{"input": "", "output": ""}]}\n'
    )
    return place


def test_the_share_of_each_runner_is_told(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(code, STDIN, CALLS, CALLS, PYTHON, PYTHON, LOGGED)
    graded.graded(read(code, *CODE))
    assert capsys.readouterr().err == "tests: 7 rows: stdin 2, calls 2, isolated 2, pytest 1\n"
    graded.graded(read(code, *CODE, "reward.options.runner=pytest"))
    assert "stdin 2, calls 2, pytest 3\n" in capsys.readouterr().err


def test_all_rows_are_told_of_but_few_shown(code: Path) -> None:
    write(code, *[[]] * 8, STDIN)
    write(code, PYTHON, LOGGED, name="held.jsonl")
    said = refusal(graded.graded, code, *CODE, "reward.options.runner=isolated")
    assert "9 rows have tests" in said and "line 5: " in said and "line 6: " not in said
    assert "and 4 more rows" in said
    write(code, STDIN)
    said = refusal(graded.graded, code, *CODE, "reward.options.runner=isolated")
    assert "held.jsonl, line 2: the runner isolated cannot run: fixture caplog" in said


def test_what_the_jobs_interpreter_has_is_asked_of_it(code: Path) -> None:
    write(code, "import pluggy\ndef test_f(caplog, nobody): pass")
    graded.graded(read(code, *CODE, f"sandbox.python={sys.executable}"))
    write(code, "import pluggy_no\ndef test_f(caplog): pass")
    said = refusal(graded.graded, code, *CODE, f"sandbox.python={sys.executable}")
    assert "jails have no pluggy_no" in said


def test_more_rows_than_there_is_time_for_are_said(
    code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(code, *[PYTHON + f"# {i}\n" for i in range(3000)])
    graded.graded(read(code, *CODE), look_s=0.1)
    said = capsys.readouterr().err
    assert said.startswith("tests: the first ")
    assert said.endswith("; those behind them are looked at when they are graded\n")


def test_our_pytest_is_lent_only_to_an_interpreter_that_runs_it(code: Path, tmp_path: Path) -> None:
    write(code, LOGGED)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    bare.chmod(0o755)
    graded.graded(read(code, *CODE, f"sandbox.python={bare}"))
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -c "raise SystemExit(3)"\n')
    said = refusal(graded.graded, code, *CODE, f"sandbox.python={bare}")
    assert "fixture caplog; there is no pytest for the runner pytest" in said
