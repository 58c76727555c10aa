"""The presence of workers and hosts: who is missing, lost or gone, and whom nothing new is placed
on.

A worker is missing while its lease is not alive. How long it has been so is remembered; after an
outage of Redis, when all leases look expired, it is counted anew (`Memory.after_outage`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshrl.common.state.pool.scheduling.snapshot import HOST_LEFT, PoolSnapshot
from meshrl.common.state.pool.store.documents import id_sort_key
from meshrl.common.state.pool.workers.rows import WorkerRow


@dataclass(frozen=True, slots=True)
class PoolAbsences:
    """The part of the planner's memory that presence is judged by."""

    missing: Mapping[str, int] = field(default_factory=dict)  # worker -> since when
    lost: frozenset[str] = frozenset()  # workers that were told lost, and are not back
    away: Mapping[str, int] = field(default_factory=dict)  # host that has died or drains -> since
    gone: frozenset[str] = frozenset()  # hosts that were told lost, and are not back
    aside: frozenset[str] = frozenset()  # workers that a person has put aside


@dataclass(frozen=True, slots=True)
class PoolPresence:
    """Who is there."""

    missing_since: dict[str, int]  # worker -> since when
    lost_workers: frozenset[str]  # missing for too long to wait for
    newly_lost_workers: tuple[str, ...]  # lost since the last look
    away_since: dict[str, int]  # host that has died or drains -> since when
    lost_hosts: frozenset[
        str
    ]  # hosts that vanished: they have died for too long, and nobody said so
    newly_lost_hosts: tuple[str, ...]  # since the last look
    returned_hosts: tuple[str, ...]  # hosts that had vanished, and are there again
    draining_hosts: frozenset[str]  # hosts
    schedulable_hosts: tuple[str, ...]  # hosts that something new may be placed on
    usable_workers: tuple[
        WorkerRow, ...
    ]  # those that jobs may have: not lost, aside, or on such a host
    expected_workers: tuple[WorkerRow, ...]  # those that a job may wait for: all that are not gone


def compute_presence(snapshot: PoolSnapshot, memory: PoolAbsences) -> PoolPresence:
    """Who is there at this look."""
    now_ms, settings = snapshot.now_ms, snapshot.settings
    workers = sorted(snapshot.workers, key=lambda w: id_sort_key(w.id))
    missing = {w.id: memory.missing.get(w.id, now_ms) for w in workers if not w.alive}
    lost = frozenset(
        worker
        for worker, since in missing.items()
        if worker in memory.lost or now_ms - since > 1000 * settings.lost_s
    )
    drains = {r.host for r in snapshot.requests if r.kind == "drain"}
    drains |= {host.name for host in snapshot.hosts if host.draining}
    dead = {host.name for host in snapshot.hosts if not host.alive and host.draining != HOST_LEFT}
    gone = frozenset(
        host
        for host in dead
        if host in memory.gone or now_ms - memory.away.get(host, now_ms) > 1000 * settings.lost_s
    )
    back = {host.name for host in snapshot.hosts if host.alive} & memory.gone
    out = drains | {host.name for host in snapshot.hosts if not host.alive}
    return PoolPresence(
        missing_since=missing,
        lost_workers=lost,
        newly_lost_workers=tuple(w.id for w in workers if w.id in lost and w.id not in memory.lost),
        away_since={host: memory.away.get(host, now_ms) for host in sorted(out)},
        lost_hosts=gone,
        newly_lost_hosts=tuple(sorted(gone - memory.gone)),
        returned_hosts=tuple(sorted(back)),
        draining_hosts=frozenset(drains),
        schedulable_hosts=tuple(h.name for h in snapshot.hosts if h.alive and h.name not in drains),
        usable_workers=tuple(
            w
            for w in workers
            if w.id not in lost and w.id not in memory.aside and w.host not in drains
        ),
        expected_workers=tuple(
            w for w in workers if now_ms - missing.get(w.id, now_ms) <= 1000 * settings.gone_s
        ),
    )


def compute_absence_s(away_since: Mapping[str, int], name: str, now_ms: int) -> float:
    """The seconds for which it has been away; 0 when it is not."""
    return (now_ms - away_since.get(name, now_ms)) / 1000
