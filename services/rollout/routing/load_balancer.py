"""The continuous balancer: which requests, waiting or running, move from one engine to another.

Requests that wait at a busy engine go to engines that have none waiting; when nobody waits and an
engine runs nothing, it takes what the fullest one runs above its plateau, at most half of it: the
plateau is the batch size from which more requests bring hardly more tokens per second, so that
giving them away costs nothing (RLBoost, arXiv 2510.19225, Algorithm 2, ContinuousLB).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

MIN_MOVED = 2  # running requests that are worth a move: each is computed again elsewhere


@dataclass(frozen=True, slots=True)
class EngineTotalLoad:
    """One engine as all shards load it."""

    name: str
    max_running: int  # requests that it runs together
    executing: int
    pending: int
    plateau_batch: int  # batch size from which throughput stays; 0: not measured yet
    version: int


@dataclass(frozen=True, slots=True)
class Rebalance:
    """`count` requests that leave one engine for another."""

    source: str
    target: str
    count: int
    waiting: bool  # requests that wait, or ones that run


def plan_rebalance(engines: Sequence[EngineTotalLoad], min_version: int) -> list[Rebalance]:
    """The moves to make now, among engines whose weights are `floor` or newer.

    Waiting requests go one by one from where most wait to an engine with room where none does. An
    idle engine takes running ones only when none wait anywhere and a plateau has been measured.
    """
    state = {e.name: e for e in engines if e.version >= min_version}
    moved: dict[tuple[str, str], int] = {}
    while step := _choose_waiting_move(list(state.values())):
        source, target = step
        moved[step] = moved.get(step, 0) + 1
        state[source] = replace(state[source], pending=state[source].pending - 1)
        state[target] = replace(state[target], executing=state[target].executing + 1)
    if moved:
        return [Rebalance(source, target, n, True) for (source, target), n in moved.items()]
    return _plan_running_moves(list(state.values()))


def _choose_waiting_move(engines: Sequence[EngineTotalLoad]) -> tuple[str, str] | None:
    """(from, to) of the next waiting request that moves."""
    free = [e for e in engines if e.pending == 0 and e.executing < e.max_running]
    crowded = [e for e in engines if e.pending > 0]
    if not free or not crowded:
        return None
    source = max(crowded, key=lambda e: (e.pending, e.name))
    target = min(free, key=lambda e: (e.executing / e.max_running, e.name))
    return source.name, target.name


def _plan_running_moves(engines: Sequence[EngineTotalLoad]) -> list[Rebalance]:
    if any(e.pending for e in engines):
        return []
    idle = sorted((e for e in engines if not e.executing), key=lambda e: (-e.max_running, e.name))
    busy = [e for e in engines if e.executing]
    if not idle or not busy:
        return []
    source = max(busy, key=lambda e: (e.executing, e.name))
    above = source.executing - source.plateau_batch if source.plateau_batch else 0
    count = min(
        above, source.executing // 2, idle[0].max_running
    )  # beyond half, the other is fuller
    return [Rebalance(source.name, idle[0].name, count, False)] if count >= MIN_MOVED else []
