"""Statistics that agents of hosts, workers and planners publish with their leases. The planner
decides by some of them, and views show all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

S = TypeVar("S")


@dataclass(frozen=True)
class HostLoadStats:
    """Room of a host and use of its processors. None: not measured yet."""

    memory_left_bytes: int | None = None
    disk_left_bytes: int | None = None
    cores: float | None = None  # processors that its processes share
    busy_cores: float | None = None  # of these, that were busy in the last seconds


@dataclass(frozen=True)
class DistanceStats:
    """Distance of a host to the head. None: not measured yet."""

    trip_ms: float | None = None  # to Redis and back
    ahead_ms: float | None = None  # of this host's clock before that of Redis' host


@dataclass(frozen=True)
class NodeStats(HostLoadStats, DistanceStats):
    """Statistics of a host's agent."""

    workers: int = 0  # that run
    adopted: int = 0  # of these, that an earlier incarnation had started
    services: int = 0  # shards and sandboxes that run
    adopted_services: int = 0
    takes: Sequence[str] | None = None  # services that may be placed there
    tiers: Sequence[str] | None = None  # of isolation, for its sandboxes; None: nobody asks
    bulk_sent: int | None = None  # bytes of the bulk port; None: it has none


@dataclass(frozen=True, slots=True)
class ResidentStats:
    """Process of a resident on a worker."""

    resident: str
    job: str
    role: str
    state: str
    tier: str
    pid: int
    restarts: int


@dataclass(frozen=True, slots=True)
class TurnStats:
    """Turns of the gang that a worker keeps."""

    turns: int = 0  # granted so far
    turns_killed: int = 0
    turn_of: Sequence[str] = ()  # residents that have one now


@dataclass(frozen=True, slots=True)
class WorkerStats(TurnStats):
    """Statistics of a worker."""

    worker: str = ""
    accelerator: str = ""
    gang: str = ""  # empty: idle
    rank: int = 0
    held_bytes: Mapping[str, int] | None = None  # by tier, and of its budget
    residents: Sequence[ResidentStats] = ()


@dataclass(frozen=True, slots=True)
class PlannerStats:
    """Statistics of a planner. None: it stands by."""

    leader: bool = False
    look_ms: float | None = None
    decide_ms: float | None = None
    write_ms: float | None = None
    workers: int | None = None
    jobs: int | None = None


def published(stats: Any) -> dict[str, Any]:
    """The fields of a dataclass that are known, as its process publishes them."""
    return {name: value for name, value in asdict(stats).items() if value is not None}


def stats_of(kind: type[S], said: Mapping[str, Any]) -> S:
    """The dataclass of what was `published`; fields that it does not have are left out."""
    names = (field.name for field in fields(kind))  # type: ignore[arg-type]
    return kind(**{name: said[name] for name in names if name in said})
