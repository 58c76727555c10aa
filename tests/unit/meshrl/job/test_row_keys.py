"""Rows that lack a key which the reward reads are named, and no others."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from meshrl.job import jobfile
from meshrl.job.row_keys import read_always


@pytest.fixture
def answered(job: Path) -> Path:
    """The job with rows that have an answer, and one held-out row that has none."""
    rows = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3", "tests": []}\n'
    (job.parent / "train.jsonl").write_text(rows)
    return job


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("reward.use=math", "answer"),
        ("reward.use=exact", "answer"),
        ("reward.use=choice", "answer"),
        ("reward.use=code_tests", "tests"),
        ('reward={use = "regex", options = {pattern = "(?P<answer>[0-9])"}}', "answer"),
        ('reward={use = "math", options = {answer = "gold"}}', "gold"),
        ('reward={parts = [{use = "exact"}]}', "answer"),
    ],
)
def test_a_row_without_the_key_of_a_built_in_reward_is_named(
    answered: Path, setting: str, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        jobfile.load(answered, [setting])
    said = str(caught.value)
    train = key in ("gold", "tests")
    place = "train.jsonl, line 1" if train else "held.jsonl, line 1"
    assert place in said and f"has no {key!r}" in said and "it has 'prompt'" in said
    assert ".options." in said and "Add it to every row" in said


def test_a_pattern_that_compares_with_nothing_needs_no_key(answered: Path) -> None:
    jobfile.load(answered, ['reward={use = "regex", options = {pattern = "[0-9]"}}'])


def test_a_row_without_the_key_of_the_authors_reward_is_named_with_both_lines(job: Path) -> None:
    source = 'def score(row, turns):\n    return float(turns[-1]["text"] == row["answer"])\n'
    (job.parent / "rewards.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        jobfile.load(job, [])
    said = str(caught.value)
    assert (
        said.startswith(f"{job}, line 13: ")
        and "train.jsonl, line 1: the row has no 'answer'" in said
    )
    assert "rewards.py, line 2, reads" in said  # fmt: skip


@pytest.mark.parametrize(
    ("body", "keys"),
    [
        ("return row['a'] == row['b']", ["a", "b"]),
        ("x = row['a']\nif not turns:\n    return 0\nreturn row['b']", ["a", "b"]),
        ("if row['kind'] == 1:\n    return row['a']\nreturn row['b']", ["kind"]),
        ("if 'a' in row:\n    return row['a']\nreturn row['b']", []),
        ("return row['a'] if turns else row['b']", []),
        ("return row.get('a')", []),
        ("row = dict(row)\nreturn row['a']", []),
        ("row['a'] = 1\nreturn row['a']", []),
        ("return bool(turns and row['a'])", []),
        ("return bool(row['a'] and row['b'])", ["a"]),
        ("try:\n    return row['a']\nexcept KeyError:\n    return 0", []),
        ("for part in row['parts']:\n    use(row['a'])\nreturn 1", ["parts"]),
        ("return sum(row['a'] for _ in turns)", []),
        ("return judge(row)", []),
        ("return row[turns]", []),
        ("raise ValueError\nreturn row['a']", []),
    ],
)
def test_only_what_every_call_reads_is_needed(body: str, keys: list[str]) -> None:
    source = "def score(row, turns):\n" + textwrap.indent(body, "    ")
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert [key for key, _ in read_always(function)] == keys
