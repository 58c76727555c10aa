"""Rewards of the job of digits: one that is right, and each way of being wrong."""

from __future__ import annotations

import time
from typing import Any

Row = dict[str, Any]
Turns = list[dict[str, Any]]


def share_of_digits(row: Row, turns: Turns) -> float:
    """More digits, more reward: every model has some, and each sample another number."""
    text = turns[-1]["text"]
    return sum(character.isdigit() for character in text) / max(1, len(text))


def broken(row: Row, turns: Turns) -> float:
    raise ValueError(f"cannot judge {row['prompt']}")


def unreliable(row: Row, turns: Turns) -> Any:
    """Wrong in another way for each kind of row; right for sums of even digits."""
    kind = row["kind"]
    print("a line on the standard output " * 100)
    if kind == "raises":
        raise ValueError("no")
    if kind == "hangs":
        time.sleep(3600)
    if kind == "garbage":
        return "a lot"
    if kind == "exits":
        raise SystemExit(3)
    return share_of_digits(row, turns)
