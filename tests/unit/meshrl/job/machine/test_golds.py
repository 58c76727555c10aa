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
from tests.unit.meshrl.job.machine.conftest import get_error, read

DIGITS = r"reward.options={pattern='#(?P<answer>[0-9]+)'}"
PATTERN = "reward.options={pattern='(?P<answer>.)'}"


def write(place: Path, *golds_: Any, name: str = "train.jsonl", **more: Any) -> None:
    rows = [{"prompt": f"{name[0]}{i}", "answer": gold, **more} for i, gold in enumerate(golds_)]
    (place.parent / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def answered_job(place: Path) -> Path:
    write(place, "A", name="held.jsonl")
    return place


def test_usable_gold_answers_pass(answered_job: Path) -> None:
    write(answered_job, 1, "Paris", choices=["London", "Paris"])
    gold_answers.check_golds(read(answered_job, "reward.use=choice"))
    write(answered_job, None)
    gold_answers.check_golds(read(answered_job, "reward.use=regex", "reward.options={pattern='B'}"))
    gold_answers.check_golds(read(answered_job))


def test_group_source_of_a_pattern_is_extracted() -> None:
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
    lines = [json.dumps({"prompt": f"{name[0]}{i}", "tests": of}) for i, of in enumerate(tests)]
    (place.parent / name).write_text("\n".join(lines) + "\n")


@pytest.fixture
def code_job(place: Path) -> Path:
    (place.parent / "held.jsonl").write_text(
        '{"prompt": "9+9", "tests": [{"input": "", "output": ""}]}\n'
    )
    return place


def test_runner_shares_are_printed(code_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tests(code_job, STDIN, CALLS, CALLS, PYTHON, PYTHON, LOGGED)
    gradable_tests.check_tests(read(code_job, *CODE))
    assert capsys.readouterr().err == "tests: 7 rows: stdin 2, calls 2, isolated 2, pytest 1\n"
    gradable_tests.check_tests(read(code_job, *CODE, "reward.options.runner=pytest"))
    assert "stdin 2, calls 2, pytest 3\n" in capsys.readouterr().err


def test_all_bad_rows_are_counted_and_few_are_shown(code_job: Path) -> None:
    write_tests(code_job, *[[]] * 8, STDIN)
    write_tests(code_job, PYTHON, LOGGED, name="held.jsonl")
    error = get_error(gradable_tests.check_tests, code_job, *CODE, "reward.options.runner=isolated")
    assert "9 rows have tests" in error and "line 5: " in error and "line 6: " not in error
    assert "and 4 more rows" in error
    write_tests(code_job, STDIN)
    error = get_error(gradable_tests.check_tests, code_job, *CODE, "reward.options.runner=isolated")
    assert "held.jsonl, line 2: the runner isolated cannot run: fixture caplog" in error


def test_imports_are_checked_with_the_jobs_interpreter(code_job: Path) -> None:
    write_tests(code_job, "import pluggy\ndef test_f(caplog, nobody): pass")
    gradable_tests.check_tests(read(code_job, *CODE, f"sandbox.python={sys.executable}"))
    write_tests(code_job, "import pluggy_no\ndef test_f(caplog): pass")
    error = get_error(
        gradable_tests.check_tests, code_job, *CODE, f"sandbox.python={sys.executable}"
    )
    assert "jails have no pluggy_no" in error


def test_rows_beyond_the_time_limit_are_reported(
    code_job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tests(code_job, *[PYTHON + f"# {i}\n" for i in range(3000)])
    gradable_tests.check_tests(read(code_job, *CODE), time_limit_s=0.1)
    output = capsys.readouterr().err
    assert output.startswith("tests: the first ")
    assert output.endswith("; later rows are checked when they are graded\n")


def test_bundled_pytest_is_provided_only_to_a_compatible_interpreter(
    code_job: Path, tmp_path: Path
) -> None:
    write_tests(code_job, LOGGED)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    bare.chmod(0o755)
    gradable_tests.check_tests(read(code_job, *CODE, f"sandbox.python={bare}"))
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -c "raise SystemExit(3)"\n')
    error = get_error(gradable_tests.check_tests, code_job, *CODE, f"sandbox.python={bare}")
    assert "fixture caplog; the runner pytest needs the package pytest" in error


def test_unwritable_output_url_is_rejected_before_the_start(place: Path, tmp_path: Path) -> None:
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


def test_output_url_with_another_run_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = JobConfig(out=f"file://{tmp_path}/out")
    with claim_run_directory(config, False) as claim:  # the URL is still empty
        assert claim.directory == tmp_path / "runs/job"
    RemoteDirectory(config.out, "out", "it").write_file("job.json", b"a run")
    with pytest.raises(Refused, match="already contains a run"), claim_run_directory(config, False):
        pass
    with claim_run_directory(config, True) as claim:
        assert claim.directory == tmp_path / "runs/job"
