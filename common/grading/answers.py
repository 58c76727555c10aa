"""Extraction of the model's answer from a trajectory's turns, shared by all rewards and judges.

It imports only the standard library, because workers import it at their start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Marks of public models around their reasoning. A quoted end, as in a program's text or in
# backticks, is no mark.
REASONING_STARTS = (
    "<think>",
    "[THINK]",
    "<seed:think>",
    "<|START_THINKING|>",
    "<|channel|>analysis",
)
_REASONING_ENDS = (
    r"</think>|\[/THINK\]|</seed:think>|<\|END_THINKING\|>|<\|channel\|>final<\|message\|>"
)
REASONING_END = re.compile(rf"(?<![\"'])(?<![^`]`)(?:{_REASONING_ENDS})(?![\"'])")
REASONING_PATTERN = re.compile(  # marks in a pattern for reasoning, too
    r"think\\?>|THINK\\?\]|(?:START|END)_THINKING|channel\\?\|"
)
CODE_FENCE = "```"
MAX_REASONING_SECTIONS = 100  # consecutive blocks of reasoning


def extract_answer(
    turns: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, keep_reasoning: bool = False
) -> str | None:
    """Return the model's last turn without its end tokens and without its reasoning.

    Args:
        turns: Turns as rewards get them (docs/use/job-file.md, "Reward arguments").
        options: The reward's; `strip` names further ends that are removed.
        keep_reasoning: Keep the reasoning.

    Returns:
        The answer, which may be empty; None if there is none: the model has no turn, its turn was
        cut, its reasoning does not end, or the trajectory was cut after calling a tool.
    """
    last = next((turn for turn in reversed(turns) if turn.get("role") == "model"), None)
    if last is None:
        return None
    stop = str(last.get("stop", ""))
    if last.get("truncated") and (not stop or last is not turns[-1]):
        return None
    text, strip = str(last.get("text", "")).removesuffix(stop), options.get("strip", [])
    ends = [end for end in ([strip] if isinstance(strip, str) else strip) if end]
    while found := next((end for end in ends if text.endswith(end)), ""):
        text = text[: -len(found)]
    return text if keep_reasoning else strip_reasoning(text)


def strip_reasoning(text: str) -> str | None:
    """Return the text after the reasoning at the start of a turn; None if the reasoning does not
    end.

    The prompt may contain the start: an end without one ends reasoning as well, unless it is in a
    comment of a fenced block.
    """
    for _ in range(MAX_REASONING_SECTIONS):
        has_start = text.lstrip().startswith(REASONING_STARTS)
        end = _find_reasoning_end(text, has_start)
        if end < 0:
            return None if has_start else text
        text = text[end:].lstrip("\r\n")
        if not text.lstrip().startswith(REASONING_STARTS):
            return text
    return None


def _find_reasoning_end(text: str, has_start: bool) -> int:
    fences = counted = 0
    for end in REASONING_END.finditer(text):
        fences += text.count(CODE_FENCE, counted, end.start())
        counted = end.start()
        line = text[text.rfind("\n", 0, counted) + 1 : counted]
        if has_start or "#" not in line or fences % 2 == 0:
            return end.end()
    return -1
