"""Decisions of the planner: plain data with rule and inputs, written by one script.

A decision is applied completely or not at all. Applying it a second time changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshrl.common.state.pool.scheduling.snapshot import Move
from meshrl.common.state.pool.workers.rows import Instance


@dataclass(frozen=True, slots=True)
class Rationale:
    """Rule that decided, and the figures of the decision."""

    # default, repair, opening, stage_time, unpaid, user, share, preempt, release, lost, undo, ...
    rule: str
    job: str = ""  # affected job
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FormGang:
    """Decision to form a gang of idle workers in this rank order."""

    gang: str
    workers: tuple[str, ...]
    rationale: Rationale


@dataclass(frozen=True, slots=True)
class DissolveGang:
    """Decision to end a gang without instances or live workers; its workers become idle."""

    gang: str
    rationale: Rationale


@dataclass(frozen=True, slots=True)
class PlaceInstance:
    """Decision to place an instance on a gang, or to change its desired state.

    Generation and epoch are the new ones. Workers end the process of another generation, and never
    one because of an epoch.
    """

    gang: str
    instance: Instance
    rationale: Rationale
    move: Move | None = None  # set for a move: reported when complete, undone when late
    request_id: str = ""  # the request that this decision grants


@dataclass(frozen=True, slots=True)
class RemoveInstance:
    """Decision to remove an instance from its gang: its processes drain and exit."""

    gang: str
    instance: str
    rationale: Rationale
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class MarkWorkerLost:
    """Decision that a worker is lost with every process on it.

    Further decisions of the same round handle the rest of its gang.
    """

    worker: str
    rationale: Rationale


@dataclass(frozen=True, slots=True)
class ReportHostPresence:
    """Decision to report that a host is lost with all its processes, or (`is_back`) available
    again.
    """

    host: str
    is_back: bool
    rationale: Rationale


@dataclass(frozen=True, slots=True)
class SetBlockReason:
    """Decision to set a job's block reason: empty if it runs, else `waiting:

    WHY` or `paused: WHY`.
    """

    job: str
    block_reason: str
    rationale: Rationale


@dataclass(frozen=True, slots=True)
class SetSeeding:
    """Decision on the time of a step until the engines on a job's core hand over; -1: no limit."""

    job: str
    seed_ms: int
    rationale: Rationale


@dataclass(frozen=True, slots=True)
class FailJob:
    """Decision to fail a job that cannot run here, with the reason."""

    job: str
    error: str
    rationale: Rationale


@dataclass(frozen=True, slots=True)
class AssignServices:
    """Decision on the full set of shards and sandboxes that a host's agent runs, by name."""

    host: str
    services: tuple[str, ...]
    rationale: Rationale


@dataclass(frozen=True, slots=True)
class FinishMove:
    """Decision that a move is complete or undone; its event has `details`."""

    move: Move
    undone: bool
    details: dict[str, Any]
    rationale: Rationale


@dataclass(frozen=True, slots=True)
class RejectRequest:
    """Decision to reject a user's request with a reason, or to close it (`reason` empty)."""

    request_id: str
    reason: str
    rationale: Rationale


@dataclass(frozen=True, slots=True)
class ReportMoveOutcome:
    """Decision to report the outcome of a job's move beside its prediction, as an event."""

    job: str
    details: dict[str, Any]
    rationale: Rationale


Decision = (
    FormGang
    | DissolveGang
    | PlaceInstance
    | RemoveInstance
    | MarkWorkerLost
    | ReportHostPresence
    | SetBlockReason
    | SetSeeding
    | FailJob
    | AssignServices
    | FinishMove
    | RejectRequest
    | ReportMoveOutcome
)
