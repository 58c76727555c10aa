"""Where a trajectory goes: join the shortest queue, with dispatch delayed until an engine has room.

A trajectory stays with the engine that holds its keys and values for as long as that engine serves;
a new or orphaned one goes to the admissible engine with the fewest trajectories, if one is below
its bound, and waits otherwise (RLBoost, arXiv 2510.19225, Algorithm 2, SelectInstance).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    name: str
    bound: int  # trajectories it may hold
    held: int
    version: int  # of its weights


def choose(engines: Iterable[EngineLoad], floor: int, home: str = "") -> str | None:
    """The engine for a trajectory that weights below `floor` may not serve; None: wait.

    `home` is the engine that served its last turn; it is kept whatever its load, since its slot is
    still the trajectory's.
    """
    admissible = [e for e in engines if e.version >= floor]
    if any(e.name == home for e in admissible):
        return home
    free = [e for e in admissible if e.held < e.bound]
    return min(free, key=lambda e: (e.held / e.bound, e.name)).name if free else None
