"""Gold answers that no answer can equal are named before a job starts, with row and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshrl.job.checks.machine.rows import golds
from tests.unit.meshrl.job.machine.conftest import read

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
    golds.usable(read(answered, "reward.use=choice"))
    write(answered, None)
    golds.usable(read(answered, "reward.use=regex", "reward.options={pattern='B'}"))
    golds.usable(read(answered))


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
        assert golds.group_source(pattern) == source
