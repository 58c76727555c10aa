"""Rewards that compare texts: `exact`, `regex`, `choice`. Each is 1 or 0."""

from __future__ import annotations

import re
from typing import Any

from meshrl.common.grading import choices, golds
from meshrl.common.grading.answers import REASONING_PATTERN, extract_answer


def score_exact(row: dict[str, Any], turns: list[dict[str, Any]], options: dict[str, Any]) -> float:
    """Return 1 if the answer is the row's, else 0."""

    def normal(text: str) -> str:
        text = "".join(text.split()) if options.get("ignore_space") else text.strip()
        return text.casefold() if options.get("ignore_case") else text

    expected, answer = normal(golds.parse_text_gold(row, options)), extract_answer(turns, options)
    return float(answer is not None and normal(answer) == expected)


def score_regex(row: dict[str, Any], turns: list[dict[str, Any]], options: dict[str, Any]) -> float:
    """Return 1 if the pattern is found in the answer, else 0.

    With a group called `answer`, the content of its last match must be the row's. A pattern that
    contains marks of reasoning is searched in the whole turn.
    """
    pattern = re.compile(options["pattern"])
    reasoning = bool(REASONING_PATTERN.search(pattern.pattern))
    answer = extract_answer(turns, options, keep_reasoning=reasoning)
    if answer is None:
        return 0.0
    found = list(pattern.finditer(answer))
    if not found or "answer" not in pattern.groupindex:
        return float(bool(found))
    return float((found[-1]["answer"] or "").strip() == golds.parse_text_gold(row, options))


def score_choice(
    row: dict[str, Any], turns: list[dict[str, Any]], options: dict[str, Any]
) -> float:
    """Return 1 if the letter that the answer names as its choice is the row's, else 0."""
    expected = golds.parse_choice_gold(row, options)
    answer = extract_answer(turns, options)
    return float(answer is not None and choices.find_choice(answer) == expected)
