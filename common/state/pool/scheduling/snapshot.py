"""All that the planner decides from, as one look of it finds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshrl.common.job.isolation.tiers import PROBING
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.workers.process_names import SERVICE_NAMES
from meshrl.common.state.pool.workers.rows import Gang, WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings

SHUTDOWN_NOTICE = (
    "is told to end"  # why nothing is placed on a host that ends soon, and may come back
)
HOST_LEFT = "has left"  # why nothing is placed on a host that is in the mesh no more


@dataclass(frozen=True, slots=True)
class PoolHost:
    """A host that workers, shards and sandboxes run on."""

    name: str
    alive: bool = True
    draining: str = ""  # why nothing new is placed there; empty: something may be
    services: tuple[str, ...] = ()  # names of shards and sandboxes that it is to run
    takes: tuple[str, ...] = tuple(SERVICE_NAMES.values())  # the services that may be placed there
    # Of isolation, those that a sandbox has there (see
    # `meshrl.common.job.isolation.tiers.contains`); None: nobody has asked, as where there is
    # one host.
    tiers: tuple[str, ...] | None = None
    cores: float = 0.0  # processors that its processes share; 0: not known
    busy_cores: float = 0.0  # of these, that were busy lately

    @property
    def is_probing_isolation(self) -> bool:
        """Whether it still finds out which isolation it has."""
        return self.tiers is not None and PROBING in self.tiers


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What a person asked for; `kind` is move or drain."""

    op: str
    kind: str
    worker: str = ""  # move: which worker
    role: str = ""  # move: to which role, as that person wrote it
    job: str = ""  # move: of which job; empty: the only one
    host: str = ""  # drain
    asked_ms: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """A change that was decided and is not complete: it is undone if it is not by `until_ms`."""

    id: str  # the resident that arrives
    gang: str
    started_ms: int
    until_ms: int
    back: dict[str, Any]  # decisions' documents that bring about what was before
    details: dict[str, Any]  # figures that decided it


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One look. Times are Redis' own, in milliseconds."""

    now_ms: int
    workers: tuple[WorkerRow, ...] = ()
    gangs: tuple[Gang, ...] = ()
    jobs: tuple[PlannedJob, ...] = ()  # those that have not ended, as they were submitted
    hosts: tuple[PoolHost, ...] = ()
    requests: tuple[PoolRequest, ...] = ()  # in the order in which they were made
    moves: tuple[Move, ...] = ()
    rests: frozenset[str] = frozenset()  # shards and sandboxes whose end would lose no work
    settings: PoolSettings = field(default_factory=PoolSettings)
    gangs_formed: int = 0  # so far: the next one is g<this>
    up_ms: int = 0  # since when the mesh is up

    @property
    def is_gathering_workers(self) -> bool:
        """Whether workers of a new mesh may still be joining."""
        return self.now_ms - self.up_ms < 1000 * self.settings.gather_s
