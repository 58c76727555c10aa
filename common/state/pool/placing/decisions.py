"""What the planner decides: plain data, written by one script, each with its rule and inputs.

A decision is applied whole or not at all, and a second time changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshrl.common.state.pool.placing.snapshot import Move
from meshrl.common.state.pool.workers.rows import Resident


@dataclass(frozen=True, slots=True)
class Why:
    """The rule that decided, and the figures that it decided by."""

    # default, repair, opening, stage_time, unpaid, user, share, preempt, release, lost, undo, ...
    rule: str
    job: str = ""  # the job that it concerns
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Form:
    """Idle workers become a gang, in this rank order."""

    gang: str
    workers: tuple[str, ...]
    why: Why


@dataclass(frozen=True, slots=True)
class Dissolve:
    """A gang without residents, or whose workers are gone, ends; its workers are idle."""

    gang: str
    why: Why


@dataclass(frozen=True, slots=True)
class Place:
    """A resident is to be on a gang as it stands here: a new one, or one whose wish has changed.

    Its generation and epoch are those that it is to have; workers end the process of another
    generation, and never one for an epoch.
    """

    gang: str
    resident: Resident
    why: Why
    move: Move | None = None  # the change is a move: told when complete, undone when late
    op: str = ""  # the request that this grants


@dataclass(frozen=True, slots=True)
class Remove:
    """A resident leaves its gang: its processes drain and end."""

    gang: str
    resident: str
    why: Why
    op: str = ""


@dataclass(frozen=True, slots=True)
class Lose:
    """A worker is gone, and with it every process on it; what its gang can do alone is decided by
    the decisions beside this one.
    """

    worker: str
    why: Why


@dataclass(frozen=True, slots=True)
class HostGone:
    """A host has vanished with all that was on it, or (`back`) is there again."""

    host: str
    back: bool
    why: Why


@dataclass(frozen=True, slots=True)
class Admit:
    """How a job stands: `held` empty, it runs; else `waiting: WHY` or `paused: WHY`."""

    job: str
    held: str
    why: Why


@dataclass(frozen=True, slots=True)
class FailJob:
    """A job that cannot run here ends, with the reason."""

    job: str
    error: str
    why: Why


@dataclass(frozen=True, slots=True)
class Serve:
    """The shards and sandboxes that a host's agent is to run, by name: all of them."""

    host: str
    services: tuple[str, ...]
    why: Why


@dataclass(frozen=True, slots=True)
class FinishMove:
    """A move is complete, or undone; its event tells what the others did meanwhile."""

    move: Move
    undone: bool
    details: dict[str, Any]
    why: Why


@dataclass(frozen=True, slots=True)
class Decline:
    """A person's request is not granted, and hears why; or it is settled (`reason` empty)."""

    op: str
    reason: str
    why: Why


@dataclass(frozen=True, slots=True)
class Judge:
    """What a move of a job has brought, beside what it was to bring: an event tells it."""

    job: str
    details: dict[str, Any]
    why: Why


Decision = (
    Form
    | Dissolve
    | Place
    | Remove
    | Lose
    | HostGone
    | Admit
    | FailJob
    | Serve
    | FinishMove
    | Decline
    | Judge
)
