"""Figures of a mesh at one moment that `meshrl top` and `watch` show; see `making.py`.

`asdict` of a frame is the document of `meshrl top --json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.state.pool.store.explained import Explained, Judged

CURVE = 24  # rewards of the last steps


@dataclass(frozen=True)
class JobFrame:
    """A job: how it stands, how fast it is, and what is predicted of it."""

    job: str
    phase: str
    held: str  # `waiting: WHY` or `paused: WHY`; empty: it runs, or has ended
    quiet: str  # for how long it has made no progress, if that is too long
    error: str
    step: int
    steps: int
    steps_per_min: float | None = None  # None: too early to say
    reward: float | None = None  # of the last step
    rewards: tuple[float, ...] = ()
    workers: int | None = None  # that it has; None: it is not told
    entitled: int | None = None  # that it is to have
    rolled_out_s: float | None = None  # tokens/s
    trained_s: float | None = None
    in_flight: int | None = None  # trajectories
    running: int | None = None  # requests in its engines that are computed
    waiting: int | None = None  # requests that wait for an engine, or in one
    wait_share: float | None = None  # of the trainer's time, for trajectories
    now: Explained | None = None


@dataclass(frozen=True)
class ResidentFrame:
    """A resident, on all the workers that it occupies."""

    gang: str
    resident: str
    workers: tuple[str, ...]
    job: str
    role: str  # the core of a training is `core`
    tier: str  # where its tensors are
    wanted: str  # where they are to be
    state: str
    tensor_parallel: int | None  # of its engine; None: it has none, or that is not known
    doing: str


@dataclass(frozen=True)
class HostFrame:
    """A host whose agent tells how busy its processors are."""

    host: str
    cores: float
    busy_cores: float


@dataclass(frozen=True)
class MoveFrame:
    """A move that is under way."""

    gang: str
    resident: str
    job: str
    was: str
    to: str
    rule: str
    since_s: float
    left_s: float  # until it is undone, if it is not complete by then
    predicted_s: float | None  # seconds a step, after it


@dataclass(frozen=True)
class Frame:
    """A mesh at one moment."""

    mesh: str
    jobs: tuple[JobFrame, ...] = ()
    residents: tuple[ResidentFrame, ...] = ()
    idle: tuple[str, ...] = ()  # workers on which nothing resides
    lost: tuple[str, ...] = ()  # workers whose process is gone
    hosts: tuple[HostFrame, ...] = ()
    moves: tuple[MoveFrame, ...] = ()
    judged: tuple[Judged, ...] = ()  # the last moves, by what came of them; oldest first
