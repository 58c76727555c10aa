"""The progress of moves under way: when one is complete, and what the other gangs did meanwhile,
which shows that a move stops nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from common.state.gangs import Gang, GangMove
from services.planner.stages import Published

COUNTS = {"engine": "tokens", "trainer": "step", "hybrid": "bins"}  # what a process has done


def finished(
    moving: Iterable[GangMove], gangs: Sequence[Gang], entries: Sequence[Published]
) -> list[tuple[GangMove, dict[str, Any]]]:
    """The moves that are complete, in the order of their gangs, each with what its event reports.
    `entries` are those of live processes.
    """
    under_way = {(move.gang, move.epoch): move for move in moving}
    done = [(under_way.get((g.id, g.epoch)), g) for g in gangs if g.settled]
    return [(move, _told(move, gangs, entries)) for move, g in done if move is not None]


def progress(gangs: Sequence[Gang], entries: Iterable[Published], but: str) -> dict[str, int]:
    """What each other gang has done so far: tokens of an engine, steps of the core, bins of a
    hybrid.
    """
    others = {g.id for g in gangs} - {but}
    return {
        e.stats["gang"]: int(e.stats.get(COUNTS[e.kind], 0))
        for e in entries
        if e.kind in COUNTS and e.stats.get("gang") in others
    }


def _told(move: GangMove, gangs: Sequence[Gang], entries: Sequence[Published]) -> dict[str, Any]:
    after = progress(gangs, entries, move.gang)
    details = dict(move.details)
    details["others"] = {
        other: {"before": before, "after": after[other]}
        for other, before in details.pop("before", {}).items()
        if other in after
    }
    return details
