"""Rows that cannot be trained on."""

from __future__ import annotations

from loadtests.mistakes.job import lines
from loadtests.mistakes.mistake import Mistake

_FIRST, _THIRD = (rf"train\.jsonl(:|, line ){line}\b" for line in (1, 3))
_ROWS = [{"prompt": f"{a}+9=", "answer": str(a + 9)} for a in range(1, 9)]


def _with(row: dict[str, object]) -> str:
    """Good rows, and this one on line 3."""
    return lines([*_ROWS[:2], row, *_ROWS[2:]])


MISTAKES = (
    Mistake(
        "rows: no such file",
        (r"dataset\.train", "trian.jsonl"),
        set={"dataset.train": "trian.jsonl"},
    ),
    Mistake("rows: empty", (r"dataset\.train", "no rows"), files={"train.jsonl": ""}),
    Mistake(
        "rows: a line that does not parse",
        (_THIRD,),
        files={"train.jsonl": lines(_ROWS[:2]) + '{"prompt": \n' + lines(_ROWS[2:])},
    ),
    Mistake(
        "rows: not UTF-8",
        (r"train\.jsonl", "utf-8"),
        files={"train.jsonl": b'{"prompt": "\xff\xfe"}\n'},
    ),
    Mistake(
        "rows: not an object",
        (_THIRD,),
        files={"train.jsonl": lines(_ROWS[:2]) + "[1, 2]\n"},
    ),
    Mistake(
        "rows: no prompt",
        (_THIRD, "prompt"),
        files={"train.jsonl": _with({"question": "1+1=", "answer": "2"})},
    ),
    Mistake(
        "rows: a prompt that is no text",
        (_THIRD, "prompt"),
        files={"train.jsonl": _with({"prompt": 5, "answer": "2"})},
    ),
    Mistake(
        "rows: an empty prompt",
        (_THIRD, "prompt"),
        files={"train.jsonl": _with({"prompt": "", "answer": "2"})},
    ),
    Mistake(
        "rows: another key than dataset.prompt",
        (r"dataset\.prompt|train\.jsonl.*1", "question"),
        set={"dataset.prompt": "question"},
    ),
    Mistake(
        "rows: a key that the reward names is missing",
        (_THIRD, "answer"),
        set={"reward.use": "exact"},
        files={"train.jsonl": _with({"prompt": "1+1="})},
    ),
    Mistake(
        "rows: sft without responses",
        (_FIRST, "response"),
        set={"algorithm.name": "sft", "algorithm.group_size": 1, "reward.use": None},
    ),
    Mistake(
        "rows: held out and trained on",
        (r"held_out\.jsonl", "train"),
        files={"held_out.jsonl": '{"prompt": "1+1=", "answer": "2"}\n'},
    ),
    Mistake(
        "rows: a prompt that leaves no room",
        (_THIRD, "max_tokens", "24"),
        files={"train.jsonl": _with({"prompt": "1+" * 20 + "1=", "answer": "21"})},
    ),
    Mistake(
        "rows: evaluation without held-out rows",
        ("held.out",),
        set={"dataset.held_out": None, "evaluation.best": "held_out.greedy"},
    ),
)
