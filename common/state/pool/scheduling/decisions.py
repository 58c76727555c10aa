"""What the planner decides: plain data, written by one script, each with its rule and inputs.

A decision is applied whole or not at all, and a second time changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshrl.common.state.pool.scheduling.snapshot import Move
from meshrl.common.state.pool.workers.rows import Instance


@dataclass(frozen=True, slots=True)
class Rationale:
    """The rule that decided, and the figures that it decided by."""

    # default, repair, opening, stage_time, unpaid, user, share, preempt, release, lost, undo, ...
    rule: str
    job: str = ""  # the job that it concerns
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FormGang:
    """Idle workers become a gang, in this rank order."""

    gang: str
    workers: tuple[str, ...]
    why: Rationale


@dataclass(frozen=True, slots=True)
class DissolveGang:
    """A gang without residents, or whose workers are gone, ends; its workers are idle."""

    gang: str
    why: Rationale


@dataclass(frozen=True, slots=True)
class PlaceInstance:
    """A resident is to be on a gang as it stands here: a new one, or one whose wish has changed.

    Its generation and epoch are those that it is to have; workers end the process of another
    generation, and never one for an epoch.
    """

    gang: str
    resident: Instance
    why: Rationale
    move: Move | None = None  # the change is a move: told when complete, undone when late
    op: str = ""  # the request that this grants


@dataclass(frozen=True, slots=True)
class RemoveInstance:
    """A resident leaves its gang: its processes drain and end."""

    gang: str
    resident: str
    why: Rationale
    op: str = ""


@dataclass(frozen=True, slots=True)
class MarkWorkerLost:
    """A worker is gone, and with it every process on it; what its gang can do alone is decided by
    the decisions beside this one.
    """

    worker: str
    why: Rationale


@dataclass(frozen=True, slots=True)
class ReportHostPresence:
    """A host has vanished with all that was on it, or (`back`) is there again."""

    host: str
    back: bool
    why: Rationale


@dataclass(frozen=True, slots=True)
class SetBlockReason:
    """How a job stands: `held` empty, it runs; else `waiting: WHY` or `paused: WHY`."""

    job: str
    held: str
    why: Rationale


@dataclass(frozen=True, slots=True)
class FailJob:
    """A job that cannot run here ends, with the reason."""

    job: str
    error: str
    why: Rationale


@dataclass(frozen=True, slots=True)
class AssignServices:
    """The shards and sandboxes that a host's agent is to run, by name: all of them."""

    host: str
    services: tuple[str, ...]
    why: Rationale


@dataclass(frozen=True, slots=True)
class FinishMove:
    """A move is complete, or undone; its event tells what the others did meanwhile."""

    move: Move
    undone: bool
    details: dict[str, Any]
    why: Rationale


@dataclass(frozen=True, slots=True)
class RejectRequest:
    """A person's request is not granted, and hears why; or it is settled (`reason` empty)."""

    op: str
    reason: str
    why: Rationale


@dataclass(frozen=True, slots=True)
class ReportMoveOutcome:
    """What a move of a job has brought, beside what it was to bring: an event tells it."""

    job: str
    details: dict[str, Any]
    why: Rationale


Decision = (
    FormGang
    | DissolveGang
    | PlaceInstance
    | RemoveInstance
    | MarkWorkerLost
    | ReportHostPresence
    | SetBlockReason
    | FailJob
    | AssignServices
    | FinishMove
    | RejectRequest
    | ReportMoveOutcome
)
