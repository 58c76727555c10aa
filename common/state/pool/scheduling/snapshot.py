"""Snapshot of all state that the planner decides from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshrl.common.job.isolation.tiers import PROBING
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.workers.process_names import SERVICE_NAMES
from meshrl.common.state.pool.workers.rows import Gang, WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings

SHUTDOWN_NOTICE = (
    "is shutting down"  # drain reason of a host that shuts down soon, and may come back
)
HOST_LEFT = "has left"  # drain reason of a host that has left the mesh


@dataclass(frozen=True, slots=True)
class PoolHost:
    """Host of workers, shards and sandboxes."""

    name: str
    alive: bool = True
    drain_reason: str = ""  # why nothing new is placed there; empty: placement is allowed
    services: tuple[str, ...] = ()  # names of its assigned shards and sandboxes
    accepted_services: tuple[str, ...] = tuple(SERVICE_NAMES.values())  # accepted services
    # Isolation tiers of a sandbox there (see
    # `meshrl.common.job.isolation.tiers.has_sufficient_tier`); None: not probed, as in a mesh of
    # one host.
    isolation_tiers: tuple[str, ...] | None = None
    cores: float = 0.0  # processors that its processes share; 0: unknown
    busy_cores: float = 0.0  # recently busy processors

    @property
    def is_probing_isolation(self) -> bool:
        """True if the host is still probing its isolation tiers."""
        return self.isolation_tiers is not None and PROBING in self.isolation_tiers


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Request of a user; `kind` is move, place or drain."""

    op: str
    kind: str
    worker: str = ""  # move: which worker
    role: str = ""  # move: to which role, as the user wrote it
    job: str = ""  # move: of which job; empty: the only one. place: which job
    partner: str = ""  # place: with which job; empty: apart again
    host: str = ""  # drain
    requested_ms: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """Change that is decided and not complete; undone unless complete by `deadline_ms`."""

    id: str  # of the arriving instance
    gang: str
    started_ms: int
    deadline_ms: int
    rollback: dict[str, Any]  # documents of the decisions that undo the move
    details: dict[str, Any]  # figures of the decision


FIRST_WORKER_GRACE_S = 30.0  # for the first worker, before a job is reported as waiting for one


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """State of the pool at one instant. Times are Redis' own, in milliseconds."""

    now_ms: int
    workers: tuple[WorkerRow, ...] = ()
    gangs: tuple[Gang, ...] = ()
    jobs: tuple[PlannedJob, ...] = ()  # jobs that have not ended, in the order of submission
    hosts: tuple[PoolHost, ...] = ()
    requests: tuple[PoolRequest, ...] = ()  # in the order of submission
    moves: tuple[Move, ...] = ()
    # shards and sandboxes that can stop without loss of work
    evictable_services: frozenset[str] = frozenset()
    settings: PoolSettings = field(default_factory=PoolSettings)
    gangs_formed: int = 0  # so far: the next one is g<gangs_formed>
    up_since_ms: int = 0  # start time of the mesh

    @property
    def is_gathering_workers(self) -> bool:
        """True if workers of a new mesh may still be joining."""
        return self._is_younger(self.settings.join_grace_s)

    @property
    def is_starting(self) -> bool:
        """True if the first worker of a new mesh may still be starting, on a slow machine."""
        return not self.workers and self._is_younger(FIRST_WORKER_GRACE_S)

    def _is_younger(self, age_s: float) -> bool:
        return self.now_ms - self.up_since_ms < 1000 * age_s
