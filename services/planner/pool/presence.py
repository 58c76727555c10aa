"""Presence of workers and hosts: which are missing, lost or gone, and which accept new instances.

A worker is missing while its lease is not alive. The start of its absence is remembered. After an
outage of Redis all leases look expired, so it restarts (`PlannerMemory.reset_after_outage`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshrl.common.state.pool.scheduling.snapshot import HOST_LEFT, PoolSnapshot
from meshrl.common.state.pool.store.documents import id_sort_key
from meshrl.common.state.pool.workers.rows import WorkerRow


@dataclass(frozen=True, slots=True)
class PoolAbsences:
    """Absences of workers and hosts in the planner's memory."""

    missing_since: Mapping[str, int] = field(default_factory=dict)  # worker -> since when
    lost_workers: frozenset[str] = frozenset()  # workers reported as lost that have not returned
    # dead or draining host -> since when
    away_since: Mapping[str, int] = field(default_factory=dict)
    lost_hosts: frozenset[str] = frozenset()  # hosts reported as lost that have not returned
    cordoned: frozenset[str] = frozenset()  # workers cordoned by a user


@dataclass(frozen=True, slots=True)
class PoolPresence:
    """Present and absent workers and hosts."""

    missing_since: dict[str, int]  # worker -> since when
    lost_workers: frozenset[str]  # missing beyond the time limit
    newly_lost_workers: tuple[str, ...]  # lost since the last snapshot
    away_since: dict[str, int]  # dead or draining host -> since when
    lost_hosts: frozenset[str]  # hosts that vanished: dead beyond the limit, without a notice
    newly_lost_hosts: tuple[str, ...]  # since the last snapshot
    returned_hosts: tuple[str, ...]  # vanished hosts that have returned
    draining_hosts: frozenset[str]  # hosts
    schedulable_hosts: tuple[str, ...]  # hosts that accept new services
    usable_workers: tuple[
        WorkerRow, ...
    ]  # those that jobs may use: not lost, cordoned, or on such a host
    expected_workers: tuple[WorkerRow, ...]  # those that a job may wait for: all that are not gone


def compute_presence(snapshot: PoolSnapshot, memory: PoolAbsences) -> PoolPresence:
    """Compute the presence of workers and hosts at this snapshot."""
    now_ms, settings = snapshot.now_ms, snapshot.settings
    workers = sorted(snapshot.workers, key=lambda w: id_sort_key(w.id))
    missing = {w.id: memory.missing_since.get(w.id, now_ms) for w in workers if not w.alive}
    lost = frozenset(
        worker
        for worker, since in missing.items()
        if worker in memory.lost_workers or now_ms - since > 1000 * settings.worker_lost_s
    )
    drains = {r.host for r in snapshot.requests if r.kind == "drain"}
    drains |= {host.name for host in snapshot.hosts if host.drain_reason}
    dead = {
        host.name for host in snapshot.hosts if not host.alive and host.drain_reason != HOST_LEFT
    }
    lost_hosts = frozenset(
        host
        for host in dead
        if host in memory.lost_hosts
        or now_ms - memory.away_since.get(host, now_ms) > 1000 * settings.worker_lost_s
    )
    back = {host.name for host in snapshot.hosts if host.alive} & memory.lost_hosts
    out = drains | {host.name for host in snapshot.hosts if not host.alive}
    return PoolPresence(
        missing_since=missing,
        lost_workers=lost,
        newly_lost_workers=tuple(
            w.id for w in workers if w.id in lost and w.id not in memory.lost_workers
        ),
        away_since={host: memory.away_since.get(host, now_ms) for host in sorted(out)},
        lost_hosts=lost_hosts,
        newly_lost_hosts=tuple(sorted(lost_hosts - memory.lost_hosts)),
        returned_hosts=tuple(sorted(back)),
        draining_hosts=frozenset(drains),
        schedulable_hosts=tuple(h.name for h in snapshot.hosts if h.alive and h.name not in drains),
        usable_workers=tuple(
            w
            for w in workers
            if w.id not in lost and w.id not in memory.cordoned and w.host not in drains
        ),
        expected_workers=tuple(
            w
            for w in workers
            if now_ms - missing.get(w.id, now_ms) <= 1000 * settings.forget_after_s
        ),
    )


def compute_absence_s(away_since: Mapping[str, int], name: str, now_ms: int) -> float:
    """Return the seconds of absence of a host or worker; 0 if it is present."""
    return (now_ms - away_since.get(name, now_ms)) / 1000
