"""Answers in the formats of public models, and what each is worth to `choice` and `math`.

Each line of a table is an answer with its gold and 1 if it is right, else 0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.services.sandbox.grading.texts import choice

TABLES = Path(__file__).parent / "texts"
LEAST_ROWS = 150
MOST_REJECTED = 0.01  # share of right answers that may be scored 0

Reward = Callable[[dict[str, Any], list[dict[str, Any]], dict[str, Any]], float]


def check(name: str, reward: Reward) -> None:
    """Score a table's answers; no wrong one may be accepted, and hardly a right one rejected."""
    rows = [json.loads(line) for line in (TABLES / name).read_text("utf-8").splitlines()]
    right = [row for row in rows if row["expected"]]
    assert len(rows) >= LEAST_ROWS and 0.3 < len(right) / len(rows) < 0.8
    accepted: list[tuple[str, str]] = []
    rejected: list[tuple[str, str]] = []
    for row in rows:
        score = reward({"answer": row["gold"]}, [{"role": "model", "text": row["text"]}], {})
        if score != row["expected"]:
            (accepted if score else rejected).append((row["text"], row["gold"]))
    assert accepted == []
    assert len(rejected) <= MOST_REJECTED * len(right), rejected


def test_choice_takes_right_letters_in_all_formats_and_no_others() -> None:
    check("choice.jsonl", choice)


@pytest.mark.group("maths")  # sympy is imported by one worker
def test_math_takes_right_answers_in_all_formats_and_no_number_anywhere() -> None:
    from meshrl.services.sandbox.grading.mathematics import maths

    check("math.jsonl", maths.reward)


HOSTILE = [
    "选" * 20_000,
    "<answer>" * 12_000,
    "the answer is " * 7_000,
    r"\boxed{" * 14_000,
    "(A" * 50_000,
    " " * 100_000,
    "A is " * 4_000,
    "answer" + " " * 19_000,
]


def test_a_hostile_text_names_no_choice_and_is_soon_read() -> None:
    begun = time.thread_time()
    for text in HOSTILE:
        assert choice({"answer": "B"}, [{"role": "model", "text": text}], {}) == 0.0
    assert time.thread_time() - begun < 3.0
