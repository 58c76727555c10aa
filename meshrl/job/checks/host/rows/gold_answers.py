"""Checks that an answer can equal each row's gold, by the rewards that compare with one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from meshrl.common.grading import golds
from meshrl.common.grading.golds import InvalidGold
from meshrl.common.job.config import RewardPartConfig
from meshrl.job import row_keys
from meshrl.job.checks.host.error_texts import join_first
from meshrl.job.dataset_rows import TimedRows
from meshrl.job.job_file import JobFile

TIME_LIMIT_S = 2.0  # for the rows of all datasets: some hundred thousand
NON_PLAIN_PATTERN = re.compile(r"\(\?(?!:)|\\[1-9bBAZ]|[$^]")  # in a group, beyond plain matching
SHOWN_ROWS = 5  # rows that an error names
ReadGold = Callable[[Mapping[str, Any], Mapping[str, Any]], str]
GOLD_READERS: dict[str, ReadGold] = {
    "exact": golds.parse_text_gold,
    "regex": golds.parse_text_gold,
    "choice": golds.parse_choice_gold,
    "math": golds.parse_math_gold,
}


def check_golds(job: JobFile, time_limit_s: float = TIME_LIMIT_S) -> None:
    """Check the golds of as many rows as the time allows.

    Raises ConfigError with the first rows whose gold no answer can equal. The reward itself rejects
    the golds of later rows.
    """
    parts = [
        part
        for part in job.config.reward.reward_parts
        if part.use in GOLD_READERS
        and (part.use != "regex" or row_keys.has_answer_group(part.options.get("pattern")))
    ]
    wrong: dict[str, list[str]] = {}  # by the dataset's key
    fix = ""
    for key, row in TimedRows(job.scored_datasets if parts else [], time_limit_s):
        for part in parts:
            try:
                text = GOLD_READERS[part.use](row.value, part.options)
                _check_ends(job, part, text)
                if part.use == "regex":
                    _check_group_can_match(part, text)
            except InvalidGold as error:
                name = part.options.get("answer", "answer")
                fix = fix or error.fix
                message = (
                    f"{row.location}: {name!r} is not a valid gold answer of {part.use!r}: {error}"
                )
                wrong.setdefault(key, []).append(message)
    for key, found in wrong.items():
        message = (
            f"{key}: no answer can equal {len(found)} gold answers: {join_first(found, SHOWN_ROWS)}"
        )
        raise job.make_error(key, message, fix[:1].upper() + fix[1:])


def _check_group_can_match(part: RewardPartConfig, text: str) -> None:
    """Raise InvalidGold for a text that the group `answer` of the pattern cannot match."""
    pattern = re.compile(part.options["pattern"])
    group = extract_group_source(pattern.pattern)
    if not group or NON_PLAIN_PATTERN.search(group):  # the context of the group may matter
        return
    # The reward takes spaces off what the group holds.
    group_pattern = re.compile(rf"\s*(?:{group})\s*", pattern.flags)
    spaced = (f"{before}{text}{behind}" for before in ("", " ") for behind in ("", " "))
    if not any(group_pattern.fullmatch(one) for one in spaced):
        raise InvalidGold(
            f"{text!r:.80} cannot match the pattern's group {group!r:.80}",
            "change the pattern, or change the gold to a text that its group `answer` matches",
        )


def extract_group_source(pattern: str) -> str:
    """Return the inside of the group `answer`; empty if it is not found by its brackets."""
    _, found, tail = pattern.partition(f"(?P<{row_keys.ANSWER_KEY}>")
    depth, at = 1, 0
    in_class = False
    while found and at < len(tail):
        character = tail[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            at += tail.startswith("^", at + 1) + tail.startswith(("]", "^]"), at + 1)
        else:
            depth += (character == "(") - (character == ")")
            if not depth:
                return tail[:at]
        at += 1
    return ""


def _check_ends(job: JobFile, part: RewardPartConfig, text: str) -> None:
    """Raise InvalidGold for a text that no turn can have, or that `strip` removes."""
    if part.use != "exact":
        return
    stop = next((one for one in job.config.rollout.stop_text if one and one in text), "")
    if stop:
        raise InvalidGold(
            f"{text!r:.80} contains {stop!r}, which ends a turn by rollout.stop_text",
            "choose another stop text",
        )
    strip = part.options.get("strip", [])
    ends = [strip] if isinstance(strip, str) else strip
    if end := next((end for end in ends if end and text.endswith(end)), ""):
        raise InvalidGold(
            f"{text!r:.80} ends with {end!r}, which options.strip removes from every answer",
            "remove that end from the gold",
        )
