"""Gold answers that no answer can equal, and rewards that are no use as numbers."""

from __future__ import annotations

from loadtests.mistakes.job import lines
from loadtests.mistakes.mistake import RUN, Mistake

_THIRD = r"train\.jsonl(:|, line )3\b"
_LETTERS = "ABCD"
_HUGE = '''"""A reward that is far too large."""


def reward(row, turns):
    return 1e30 * (len(turns[0]["text"]) + hash(turns[0]["text"]) % 7)
'''
_PARTS = "reward={parts=[{use='mine:reward', weight=1e308}, {use='mine:reward'}]}"
_OVERFLOWING = '''"""A reward whose weighted sum overflows."""


def reward(row, turns):
    return 100.0
'''


def _golds(gold: object, **more: object) -> dict[str, str]:
    """Rows with letters as golds, and this one on line 3."""
    rows: list[dict[str, object]] = [
        {"prompt": f"{a}+9=", "answer": _LETTERS[a % 4]} | more for a in range(1, 9)
    ]
    rows[2]["answer"] = gold
    return {"train.jsonl": lines(rows)}


_CHOICE, _EXACT, _MATH = ({"reward.use": use} for use in ("choice", "exact", "math"))

MISTAKES = (
    Mistake(
        "rewards: a class label in a row without choices",
        (_THIRD, "number 1", "choices", "write the letter"),
        set=_CHOICE,
        files=_golds(1),
    ),
    Mistake(
        "rewards: a class label beyond the choices",
        (_THIRD, "number 4 of 4 choices", "0 to 3"),
        set=_CHOICE,
        files=_golds(4, choices=["1", "2", "3", "5"]),
    ),
    Mistake(
        "rewards: a letter beyond the letters",
        (_THIRD, "'F'", "ABCD"),
        set=_CHOICE | {"reward.options": {"letters": "ABCD"}},
        files=_golds("F"),
    ),
    Mistake(
        "rewards: letters that are digits",
        (r"reward\.options", "letters", "ABCD"),
        set=_CHOICE | {"reward.options": {"letters": "1234"}},
        files=_golds("A"),
    ),
    Mistake(
        "rewards: a gold with a point",
        (_THIRD, r"42\.0", "write the text"),
        set=_EXACT,
        files=_golds(42.0),
    ),
    Mistake(
        "rewards: a null as gold",
        (_THIRD, "null", "leave the row out"),
        set=_EXACT,
        files=_golds(None),
    ),
    Mistake(
        "rewards: a list as gold",
        (_THIRD, "list", "write the text"),
        set=_EXACT,
        files=_golds(["A"]),
    ),
    Mistake(
        "rewards: an empty gold of a pattern",
        (_THIRD, "empty"),
        set={"reward.use": "regex", "reward.options": {"pattern": "(?P<answer>[A-D])"}},
        files=_golds(" "),
    ),
    Mistake(
        "rewards: a gold that the pattern's group cannot hold",
        (_THIRD, "'E'", "group can hold", "change the pattern"),
        set={"reward.use": "regex", "reward.options": {"pattern": "(?P<answer>[A-D])"}},
        files=_golds("E"),
    ),
    Mistake(
        "rewards: a gold that holds the stop text",
        (_THIRD, "stop_text", "another stop text"),
        set=_EXACT | {"rollout.stop_text": ["#"]},
        files=_golds("A#B"),
    ),
    Mistake(
        "rewards: a gold in mathematics with an open brace",
        (_THIRD, "braces", "close every brace"),
        set=_MATH,
        files=_golds("\\frac{1}{2"),
    ),
    Mistake(
        "rewards: too large to train on",
        ("rewards of group", r"e\+3", "divide what the reward returns"),
        running=True,
        set={"algorithm.name": "dr_grpo"},
        files={"mine.py": _HUGE},
    ),
    Mistake(
        "rewards: a weighted sum that is not finite",
        (r"reward\.parts is not finite", r"1e\+308 \* 100"),
        running=True,
        argv=(*RUN, "--set", _PARTS),
        files={"mine.py": _OVERFLOWING},
    ),
)
