"""Checks of a job's answers: gold answers, graded tests and declared outputs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.base.files.remote_directory import RemoteDirectory
from meshrl.common.job.config import JobConfig
from meshrl.directory.run_claims import claim_run_directory
from meshrl.job.checks.host import all_checks
from meshrl.job.checks.host.rows import gold_answers, gradable_tests
from tests.unit.meshrl.job.machine.conftest import read, refusal

DIGITS = r"reward.options={pattern='#(?P<answer>[0-9]+)'}"
PATTERN = "reward.options={pattern='(?P<answer>.)'}"


def write(place: Path, *golds_: Any, name: str = "train.jsonl", **more: Any) -> None:
    rows = [{"prompt": str(i), "answer": gold, **more} for i, gold in enumerate(golds_)]
    (place.parent / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def answered(place: Path) -> Path:
    write(place, "A", name="held.jsonl")
    return place


def test_usable_golds_pass(answered: Path) -> None:
    write(answered, 1, "Paris", choices=["London", "Paris"])
    gold_answers.check_golds(read(answered, "reward.use=choice"))
    write(answered, None)
    gold_answers.check_golds(read(answered, "reward.use=regex", "reward.options={pattern='B'}"))
    gold_answers.check_golds(read(answered))


def test_the_inside_of_a_patterns_group_is_found() -> None:
    sources = {
        r"#(?P<answer>\d+)$": r"\d+",
        r"\((?P<answer>[)(\]]+)\)": r"[)(\]]+",
        r"(?P<answer>(a|b)\))": r"(a|b)\)",
        r"(?P<answer>[]a]*)": "[]a]*",
        r"(?P<answer>[^]a]*)": "[^]a]*",
        r"(\d+)": "",
    }
    for pattern, source in sources.items():
        assert gold_answers.extract_group_source(pattern) == source


CODE = ["reward.use=code_tests"]
STDIN = [{"input": "1", "output": "2"}]
CALLS = {"function": "f", "cases": [{"args": [1], "output": 2}]}
PYTHON = "from solution import f\ndef test_f():\n    assert f(1) == 2\n"
LOGGED = "from solution import f\ndef test_f(caplog):\n    assert f(1) == 2\n"


def write_tests(place: Path, *tests: Any, name: str = "train.jsonl") -> None:
    lines = [json.dumps({"prompt": str(i), "tests": of}) for i, of in enumerate(tests)]
    (place.parent / name).write_text("\n".join(lines) + "\n")


@pytest.fixture
def code(place: Path) -> Path:
    (place.parent / "held.jsonl").write_text(
        '{"prompt": "9+9", "tests": [{"input": "", "output": ""}]}\n'
    )
    return place


def test_the_share_of_each_runner_is_told(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tests(code, STDIN, CALLS, CALLS, PYTHON, PYTHON, LOGGED)
    gradable_tests.check_tests(read(code, *CODE))
    assert capsys.readouterr().err == "tests: 7 rows: stdin 2, calls 2, isolated 2, pytest 1\n"
    gradable_tests.check_tests(read(code, *CODE, "reward.options.runner=pytest"))
    assert "stdin 2, calls 2, pytest 3\n" in capsys.readouterr().err


def test_all_rows_are_told_of_but_few_shown(code: Path) -> None:
    write_tests(code, *[[]] * 8, STDIN)
    write_tests(code, PYTHON, LOGGED, name="held.jsonl")
    said = refusal(gradable_tests.check_tests, code, *CODE, "reward.options.runner=isolated")
    assert "9 rows have tests" in said and "line 5: " in said and "line 6: " not in said
    assert "and 4 more rows" in said
    write_tests(code, STDIN)
    said = refusal(gradable_tests.check_tests, code, *CODE, "reward.options.runner=isolated")
    assert "held.jsonl, line 2: the runner isolated cannot run: fixture caplog" in said


def test_what_the_jobs_interpreter_has_is_asked_of_it(code: Path) -> None:
    write_tests(code, "import pluggy\ndef test_f(caplog, nobody): pass")
    gradable_tests.check_tests(read(code, *CODE, f"sandbox.python={sys.executable}"))
    write_tests(code, "import pluggy_no\ndef test_f(caplog): pass")
    said = refusal(gradable_tests.check_tests, code, *CODE, f"sandbox.python={sys.executable}")
    assert "jails have no pluggy_no" in said


def test_more_rows_than_there_is_time_for_are_said(
    code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tests(code, *[PYTHON + f"# {i}\n" for i in range(3000)])
    gradable_tests.check_tests(read(code, *CODE), time_limit_s=0.1)
    said = capsys.readouterr().err
    assert said.startswith("tests: the first ")
    assert said.endswith("; those behind them are looked at when they are graded\n")


def test_our_pytest_is_lent_only_to_an_interpreter_that_runs_it(code: Path, tmp_path: Path) -> None:
    write_tests(code, LOGGED)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    bare.chmod(0o755)
    gradable_tests.check_tests(read(code, *CODE, f"sandbox.python={bare}"))
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -c "raise SystemExit(3)"\n')
    said = refusal(gradable_tests.check_tests, code, *CODE, f"sandbox.python={bare}")
    assert "fixture caplog; there is no pytest for the runner pytest" in said


def test_a_url_that_cannot_be_written_is_refused_before_anything_starts(
    place: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    for url, why in (
        (f"file://{tmp_path}/file/out", "NotADirectoryError|FileExistsError"),
        ("nosuch://bucket/out", "nosuch"),
        (f"file://me:secret@{tmp_path}/out", "a user, a password or a query"),
        (f"file://{tmp_path}/out?sig=secret", "a query"),
        (f"simplecache::file://me:secret@{tmp_path}/out", "a chain of URLs"),
    ):
        with pytest.raises(MeshError, match=why) as caught:
            all_checks.check_urls_writable(read(place, f'out="{url}"'))
        assert "secret" not in str(caught.value)
    url = f"file://{tmp_path}/new/out"
    all_checks.check_urls_writable(read(place, f'out="{url}"'))
    assert list((tmp_path / "new/out").iterdir()) == []


def test_a_url_where_a_run_lies_is_no_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = JobConfig(out=f"file://{tmp_path}/out")
    with claim_run_directory(config, False) as claim:  # nothing is there yet
        assert claim.directory == tmp_path / "runs/job"
    RemoteDirectory(config.out, "out", "it").write_file("job.json", b"a run")
    with pytest.raises(Refused, match="a run lies at"), claim_run_directory(config, False):
        pass
    with claim_run_directory(config, True) as claim:
        assert claim.directory == tmp_path / "runs/job"
