"""Extracts the model's answer from a trajectory's turns. It imports only the standard library, as
workers start with it.
"""

from __future__ import annotations

from typing import Any


def answer_of(turns: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """The model's last turn without what ends it; empty when a trajectory does not end with one."""
    if not turns or turns[-1].get("role") != "model":
        return ""
    text = str(turns[-1].get("text", "")).removesuffix(turns[-1].get("stop", ""))
    ends = options.get("strip", [])
    ends = [ends] if isinstance(ends, str) else list(ends)
    stripped = True
    while stripped:
        stripped = False
        for end in ends:
            if end and text.endswith(end):
                text, stripped = text[: -len(end)], True
    return text
