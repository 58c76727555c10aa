"""Rewards that compare texts: `exact`, `regex`, `choice`. Each is 1 or 0."""

from __future__ import annotations

import re
from typing import Any

from services.sandbox.grading.answers import answer_of

CHOICE = re.compile(
    r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Z])\)?\s*\}?\s*\}"  # \boxed{B}, \boxed{\text{(B)}}
    r"|\(([A-Z])\)"  # (B)
    r"|\b[Aa]nswer\s*(?:is|:)?\s*:?\s*\**\s*([A-Z])\b"  # answer is B, Answer: B
)
ALONE = re.compile(r"\W*([A-Za-z])\W*")


def exact(row: dict[str, Any], turns: list[dict[str, Any]], options: dict[str, Any]) -> float:
    """Whether the answer is the row's."""

    def normal(text: str) -> str:
        text = "".join(text.split()) if options.get("ignore_space") else text.strip()
        return text.casefold() if options.get("ignore_case") else text

    wanted = row[options.get("answer", "answer")]
    return float(normal(answer_of(turns, options)) == normal(str(wanted)))


def regex(row: dict[str, Any], turns: list[dict[str, Any]], options: dict[str, Any]) -> float:
    """Whether the pattern is found in the answer; with a group called `answer`, whether what its
    last match holds is the row's.
    """
    pattern = re.compile(options["pattern"])
    found = list(pattern.finditer(answer_of(turns, options)))
    if not found or "answer" not in pattern.groupindex:
        return float(bool(found))
    wanted = str(row[options.get("answer", "answer")]).strip()
    return float((found[-1]["answer"] or "").strip() == wanted)


def choice(row: dict[str, Any], turns: list[dict[str, Any]], options: dict[str, Any]) -> float:
    """Whether the last letter that the answer names as its choice is the row's."""
    text = answer_of(turns, options)
    letters = options.get("letters", "ABCDEFGHIJ")
    named = [next(filter(None, match.groups())) for match in CHOICE.finditer(text)]
    alone = ALONE.fullmatch(text)
    said = named[-1] if named else alone[1].upper() if alone else ""
    wanted = str(row[options.get("answer", "answer")]).strip().strip("()").upper()
    return float(bool(said) and said in letters and said == wanted)
