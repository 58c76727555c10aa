"""Continuous balancer: it selects waiting or running requests that move to another engine.

Waiting requests of a busy engine move to engines without waiting requests. If none waits and an
engine is idle, it receives running requests of the fullest engine above its plateau, at most half
of them. The plateau is the batch size from which more requests hardly increase tokens per second.
So such a move costs no throughput (RLBoost, arXiv 2510.19225, Algorithm 2, ContinuousLB).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

MIN_MOVED = 2  # minimum running requests of a move: each is recomputed at the target


@dataclass(frozen=True, slots=True)
class EngineTotalLoad:
    """Load of one engine by all shards."""

    name: str
    max_running: int  # requests that it runs together
    running: int
    waiting: int
    plateau_batch: int  # batch size with constant throughput from there on; 0: not measured yet
    version: int


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Move of `count` requests from one engine to another."""

    source: str
    target: str
    count: int
    waiting: bool  # True: waiting requests; False: running ones


def plan_rebalance(engines: Sequence[EngineTotalLoad], min_version: int) -> list[Rebalance]:
    """Plan the moves to make now, among engines whose weights are `min_version` or newer.

    Waiting requests move one by one from the longest queue to an engine with free capacity and no
    queue. An idle engine receives running requests only if none wait anywhere and a plateau has
    been measured.
    """
    state = {e.name: e for e in engines if e.version >= min_version}
    moved: dict[tuple[str, str], int] = {}
    while step := _choose_waiting_move(list(state.values())):
        source, target = step
        moved[step] = moved.get(step, 0) + 1
        state[source] = replace(state[source], waiting=state[source].waiting - 1)
        state[target] = replace(state[target], running=state[target].running + 1)
    if moved:
        return [Rebalance(source, target, n, True) for (source, target), n in moved.items()]
    return _plan_running_moves(list(state.values()))


def _choose_waiting_move(engines: Sequence[EngineTotalLoad]) -> tuple[str, str] | None:
    """Choose source and target of the next waiting request to move."""
    free = [e for e in engines if e.waiting == 0 and e.running < e.max_running]
    crowded = [e for e in engines if e.waiting > 0]
    if not free or not crowded:
        return None
    source = max(crowded, key=lambda e: (e.waiting, e.name))
    target = min(free, key=lambda e: (e.running / e.max_running, e.name))
    return source.name, target.name


def _plan_running_moves(engines: Sequence[EngineTotalLoad]) -> list[Rebalance]:
    if any(e.waiting for e in engines):
        return []
    idle = sorted((e for e in engines if not e.running), key=lambda e: (-e.max_running, e.name))
    busy = [e for e in engines if e.running]
    if not idle or not busy:
        return []
    source = max(busy, key=lambda e: (e.running, e.name))
    above = source.running - source.plateau_batch if source.plateau_batch else 0
    # beyond half, the target would be fuller
    count = min(above, source.running // 2, idle[0].max_running)
    return [Rebalance(source.name, idle[0].name, count, False)] if count >= MIN_MOVED else []
