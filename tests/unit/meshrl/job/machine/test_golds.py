"""Gold answers that no answer can equal are named before a job starts, with row and remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshrl.job.checks.machine.rows import golds
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


@pytest.mark.parametrize(
    ("settings", "golds_", "says"),
    [
        (["reward.use=choice"], ["B", 1], r"line 2: 'answer'.*no 'choices'.*Write the letter"),
        (["reward.use=choice"], ["B", None], "line 2.*null"),
        (["reward.use=exact"], ["B", 42.0], "line 2.*a number with a point"),
        (["reward.use=exact"], ["B", ["B"]], "line 2.*a list"),
        (["reward.use=math"], ["1", r"\frac{1}{2"], "line 2.*braces.*Close every brace"),
        (["reward.use=regex", PATTERN], ["B", None], "line 2.*null"),
        (["reward.use=regex", DIGITS], ["8", "B"], r"line 2.*group can hold.*Change the pattern"),
        (["reward={parts=[{use='exact'}, {use='math'}]}"], ["B", ""], "2 gold answers.*line 2"),
        (
            ["reward.use=exact", "rollout.stop_text=['#']"],
            ["B", "B#C"],
            "line 2.*where a turn ends.*Choose another stop text",
        ),
        (
            ["reward.use=exact", "reward.options={strip='#'}"],
            ["B", "B#"],
            "line 2.*options.strip.*Leave the end out",
        ),
    ],
)
def test_golds_are_refused_with_row_and_remedy(
    answered: Path, settings: list[str], golds_: list[Any], says: str
) -> None:
    write(answered, *golds_)
    assert re.search(says, refusal(golds.usable, answered, *settings))


def test_usable_golds_pass(answered: Path) -> None:
    write(answered, 1, "Paris", choices=["London", "Paris"])
    golds.usable(read(answered, "reward.use=choice"))
    write(answered, None)
    golds.usable(read(answered, "reward.use=regex", "reward.options={pattern='B'}"))
    golds.usable(read(answered))


def test_all_rows_are_counted_and_the_first_ones_named(answered: Path) -> None:
    write(answered, *[None] * 7)
    text = refusal(golds.usable, answered, "reward.use=exact")
    assert "7 gold answers" in text and "line 5" in text and "line 6" not in text
    assert "and 2 more" in text


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
