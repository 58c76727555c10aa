"""Seeding: engines on the core's workers generate at the start of a step, and then hand over.

Such an engine is open for `seed_s` after it has loaded a version, and then closed until the next
one. Its requests continue at other engines after their last tokens, and the core has the
accelerators (RLBoost, arXiv 2510.19225, adaptive partial-response seeding). The planner computes
`seed_s` (`services/planner/policies/offload.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.services.rollout.routing.load_balancer import EngineTotalLoad

PRECISION_S = 0.001  # a shorter sleep may end before the clock has moved


@dataclass(frozen=True, slots=True)
class SeedingEngine:
    """State of one engine for its window."""

    name: str
    takes_slices: bool  # shares the core's workers
    version: int  # of its weights; negative: it does not serve
    loaded_s: float  # seconds since it has loaded them


def list_closed(engines: Sequence[SeedingEngine], seed_s: float | None) -> set[str]:
    """Return the names of the engines whose window has ended.

    An engine stays open while no other one serves its version. `seed_s` None: all stay open.
    """
    if seed_s is None:
        return set()
    newest = max((e.version for e in engines if not e.takes_slices), default=-1)
    return {
        e.name
        for e in engines
        if e.takes_slices and 0 <= e.version <= newest and e.loaded_s > seed_s - PRECISION_S
    }


def compute_wait_s(engines: Sequence[SeedingEngine], seed_s: float | None) -> float | None:
    """Return the seconds until the next window ends; None if none does."""
    if seed_s is None:
        return None
    left = [seed_s - e.loaded_s for e in engines if e.takes_slices and e.version >= 0]
    return min((s for s in left if s >= PRECISION_S), default=None)


def choose_targets(count: int, engines: Sequence[EngineTotalLoad]) -> list[str]:
    """Return an engine for each of `count` requests: each time the one with the least full batch.

    The requests that find no free slot there wait in the shard's queue.
    """
    full = {e.name: float(e.running + e.waiting) for e in engines}
    size = {e.name: max(1, e.max_running) for e in engines}
    targets = []
    for _ in range(count if engines else 0):
        name = min(full, key=lambda one: (full[one] / size[one], one))
        full[name] += 1
        targets.append(name)
    return targets
