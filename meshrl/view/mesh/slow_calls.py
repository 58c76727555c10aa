"""Calls of a job's functions that run longer than their deadlines, such as an endless loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshrl.common.state.registry import RegistryEntry

CALL_WAIT = "the end of the call"  # wait of a sandbox for a reward or a tool
REWARD_PREFIX = "reward of "


def find_slow_calls(
    entries: Iterable[RegistryEntry], document: Mapping[str, Any], now_ms: float
) -> dict[str, str]:
    """Return a line for each function whose call runs longer than its deadline.

    The deadline is of computing time, so that a call on a loaded machine may take longer.
    """
    found: dict[str, str] = {}
    for entry in entries:
        for wait in entry.waits if entry.alive and entry.kind == "sandbox" else ():
            function = str(wait["on"]).partition(" (pid")[0]
            key = "reward.deadline_s"
            if not function.startswith(REWARD_PREFIX):
                key = "environment.tool_deadline_s"
            table, _, name = key.partition(".")
            deadline_s, took_s = document[table][name], (now_ms - wait["since_ms"]) / 1000
            if wait["what"] == CALL_WAIT and took_s > deadline_s:
                found[function] = (
                    f"{function} has not returned for {took_s:.0f} s, and {key} is {deadline_s:g}: "
                    "is there an endless loop?"
                )
    return found
