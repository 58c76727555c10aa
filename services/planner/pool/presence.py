"""The presence of workers and hosts: who is missing, lost or gone, and whom nothing new is placed
on.

A worker is missing while its lease is not alive. How long it has been so is remembered; after an
outage of Redis, when all leases look expired, it is counted anew (`Memory.after_outage`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshrl.common.state.pool.placing.snapshot import LEFT, Snapshot
from meshrl.common.state.pool.store.documents import numbered
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
class Presence:
    """Who is there."""

    missing: dict[str, int]  # worker -> since when
    lost: frozenset[str]  # missing for too long to wait for
    newly: tuple[str, ...]  # lost since the last look
    away: dict[str, int]  # host that has died or drains -> since when
    gone: frozenset[str]  # hosts that vanished: they have died for too long, and nobody said so
    newly_gone: tuple[str, ...]  # since the last look
    back: tuple[str, ...]  # hosts that had vanished, and are there again
    draining: frozenset[str]  # hosts
    takes: tuple[str, ...]  # hosts that something new may be placed on
    usable: tuple[WorkerRow, ...]  # those that jobs may have: not lost, aside, or on such a host
    counted: tuple[WorkerRow, ...]  # those that a job may wait for: all that are not gone


def present(snapshot: Snapshot, memory: PoolAbsences) -> Presence:
    """Who is there at this look."""
    now_ms, settings = snapshot.now_ms, snapshot.settings
    workers = sorted(snapshot.workers, key=lambda w: numbered(w.id))
    missing = {w.id: memory.missing.get(w.id, now_ms) for w in workers if not w.alive}
    lost = frozenset(
        worker
        for worker, since in missing.items()
        if worker in memory.lost or now_ms - since > 1000 * settings.lost_s
    )
    drains = {r.host for r in snapshot.requests if r.kind == "drain"}
    drains |= {host.name for host in snapshot.hosts if host.draining}
    dead = {host.name for host in snapshot.hosts if not host.alive and host.draining != LEFT}
    gone = frozenset(
        host
        for host in dead
        if host in memory.gone or now_ms - memory.away.get(host, now_ms) > 1000 * settings.lost_s
    )
    back = {host.name for host in snapshot.hosts if host.alive} & memory.gone
    out = drains | {host.name for host in snapshot.hosts if not host.alive}
    return Presence(
        missing=missing,
        lost=lost,
        newly=tuple(w.id for w in workers if w.id in lost and w.id not in memory.lost),
        away={host: memory.away.get(host, now_ms) for host in sorted(out)},
        gone=gone,
        newly_gone=tuple(sorted(gone - memory.gone)),
        back=tuple(sorted(back)),
        draining=frozenset(drains),
        takes=tuple(h.name for h in snapshot.hosts if h.alive and h.name not in drains),
        usable=tuple(
            w
            for w in workers
            if w.id not in lost and w.id not in memory.aside and w.host not in drains
        ),
        counted=tuple(
            w for w in workers if now_ms - missing.get(w.id, now_ms) <= 1000 * settings.gone_s
        ),
    )


def gone_for(since: Mapping[str, int], name: str, now_ms: int) -> float:
    """The seconds for which it has been away; 0 when it is not."""
    return (now_ms - since.get(name, now_ms)) / 1000
