"""Gold answers as rewards compare them, and those that no answer can equal."""

from __future__ import annotations

from typing import Any

import pytest

from meshrl.common.grading.golds import BadGold, letter, mathematics, text_of

CITIES = ["London", "Paris", "Rome"]
LABELLED = {"text": CITIES, "label": ["A", "B", "C"]}
NUMBERED = {"text": CITIES, "label": ["1", "2", "3"]}
TABLES = [{"label": "A", "text": "London"}, {"label": "B", "text": "Paris"}]

LETTERS: list[tuple[Any, Any, str]] = [  # gold, choices (None: the row has none), letter
    ("B", None, "B"),
    ("b", None, "B"),
    ("(B)", None, "B"),
    ("B.", None, "B"),
    ("B. Paris", None, "B"),
    ("Paris", CITIES, "B"),
    ("paris ", CITIES, "B"),
    (1, CITIES, "B"),
    (1.0, CITIES, "B"),
    ("1", CITIES, "B"),
    (0, CITIES, "A"),
    ("B", CITIES, "B"),
    ("B", LABELLED, "B"),
    (1, LABELLED, "B"),
    ("2", NUMBERED, "B"),
    (1, TABLES, "B"),
    ("B", {"A": "London", "B": "Paris"}, "B"),
    ("4", ["3", "4", "5"], "B"),
]
NO_LETTERS: list[tuple[Any, Any, str]] = [  # gold, choices, what is wrong
    (1, None, "no 'choices'"),
    ("1", None, "no 'choices'"),
    (3, CITIES, "count from 0 to 2"),
    (-1, CITIES, "count from 0 to 2"),
    ("1", ["0", "2", "1"], "the text of another one"),
    ("D", CITIES, "none of the letters ABC"),
    ("Z", None, "none of the letters ABCDEFGHIJ"),
    ("Berlin", CITIES, "none of the row's choices"),
    ("Paris", None, "the row has no choices"),
    (True, CITIES, "not a letter"),
    (None, CITIES, "null"),
    (["B"], CITIES, "a list"),
    ("", CITIES, "empty"),
]


def test_golds_of_choices_are_letters_however_rows_write_them() -> None:
    for gold, choices, wanted in LETTERS:
        row = {"answer": gold} | ({} if choices is None else {"choices": choices})
        assert letter(row, {}) == wanted, row


def test_golds_that_name_no_choice_are_refused() -> None:
    for gold, choices, wrong in NO_LETTERS:
        row = {"answer": gold} | ({} if choices is None else {"choices": choices})
        with pytest.raises(BadGold, match=wrong) as refused:
            letter(row, {})
        assert refused.value.fix, row


def test_golds_of_texts() -> None:
    for gold, wanted in ((42, "42"), (" Paris ", "Paris"), (3.5, "3.5"), ("None", "None")):
        assert text_of({"gold": gold}, {"answer": "gold"}) == wanted
    wrong: dict[Any, str] = {
        42.0: "a number with a point",
        1e30: "a number with a point",
        "  ": "empty",
    }
    wrong |= {None: "null"}
    for gold, told in wrong.items():
        with pytest.raises(BadGold, match=told):
            text_of({"answer": gold}, {})
    for value in (["42"], {"value": 42}):
        with pytest.raises(BadGold, match="not a text"):
            text_of({"answer": value}, {})
    with pytest.raises(BadGold, match="no 'answer'"):
        text_of({}, {})


def test_golds_of_mathematics() -> None:
    solution = "She sells 72.\n#### 72"
    for gold, wanted in ((42, "42"), (42.0, "42"), (solution, "72"), (r"\{1,2\}", r"\{1,2\}")):
        assert mathematics({"answer": gold}, {}) == wanted
    unusable: dict[Any, str] = {
        r"\frac{1}{2": "braces",
        "eval(7)": "eval",
        "7" * 3000: "characters",
        None: "null",
    }
    for bad, told in unusable.items():
        with pytest.raises(BadGold, match=told):
            mathematics({"answer": bad}, {})
