"""Rounds of arms in rotating order: what changes on a machine meanwhile meets each alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

P = TypeVar("P")
Arm = dict[str, Any]


async def measured(
    runs: Mapping[str, Callable[[P], Awaitable[Arm]]], plan: P, names: Sequence[str], rounds: int
) -> dict[str, list[Arm]]:
    """What each round of each arm has found, also told on stderr as it comes; each round begins
    with another arm.
    """
    found: dict[str, list[Arm]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            arm = await runs[name](plan)
            print(json.dumps({"arm": name, "round": number, **arm}), file=sys.stderr, flush=True)
            found[name].append(arm)
    return found
