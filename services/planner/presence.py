"""The presence of gangs: which are missing, lost or gone, and which may still be joining.

A gang is missing while the lease of one of its workers is not alive, or not all of them have
joined. How long it has been missing is known to who has looked all the time: a new leader counts
anew, and so does one that has seen an outage of Redis, after which all leases look expired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from common.state.gangs import Gang

GATHER_S = 5.0  # workers of a new mesh may take this long to join before the split is made
LOST_S = 10.0  # a worker whose lease has been gone this long is not waited for
GONE_S = 300.0  # missing so long, it no longer belongs to the mesh: hosts boot in less


def missing_since(
    gangs: Sequence[Gang], alive: AbstractSet[str], before: Mapping[str, float], now_s: float
) -> dict[str, float]:
    """The time since which each missing gang is missing, by its id. `before` is the last look's
    answer, `alive` names live processes.
    """
    missing = (g.id for g in gangs if _away(g, alive) or not g.whole)
    return {gang: before.get(gang, now_s) for gang in missing}


def newly_lost(
    gangs: Sequence[Gang], alive: AbstractSet[str], missing: Mapping[str, float], now_s: float
) -> list[str]:
    """The ids of gangs to mark as lost now; a gang that has never been whole is not among them."""
    return [
        g.id
        for g in gangs
        if _away(g, alive) and now_s - missing[g.id] > LOST_S and g.actual_state != "lost"
    ]


def counted(gangs: Sequence[Gang], missing: Mapping[str, float], now_s: float) -> list[Gang]:
    """The gangs that a job may wait for: all but those that are gone."""
    return [g for g in gangs if now_s - missing.get(g.id, now_s) <= GONE_S]


def gathering(gangs: Sequence[Gang], workers: int, up_s: float) -> bool:
    """Whether some of the job's workers may still be joining a mesh that is up for so long."""
    return sum(len(g.workers) for g in gangs) < workers and up_s < GATHER_S


def usable(gangs: Sequence[Gang]) -> list[Gang]:
    """The gangs that are not lost."""
    return [g for g in gangs if g.actual_state != "lost"]


def _away(gang: Gang, alive: AbstractSet[str]) -> bool:
    return not set(gang.workers) <= alive
