"""Rows that lack a key which the reward reads are named, and no others."""

from __future__ import annotations

import ast
import textwrap

import pytest

from meshrl.job.row_keys import read_always


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
