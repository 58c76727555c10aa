"""Figures of a mesh at one moment that `meshrl top` and `watch` show, made of its snapshots.

`asdict` of a frame is the document of `meshrl top --json`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from meshrl.common.api.stats import NodeStats
from meshrl.common.state import steps
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.pool.placing.snapshot import Move
from meshrl.common.state.pool.store.explained import Explained, Judged
from meshrl.common.state.pool.workers.names import role_process
from meshrl.common.state.pool.workers.rows import Gang, Resident, Role
from meshrl.common.state.redis.client import State
from meshrl.common.state.registry import Entry
from meshrl.view.mesh.processes import owner
from meshrl.view.mesh.quiet import quiet_text
from meshrl.view.mesh.rates import TokenRate, steps_per_min, trained_rate, wait_share
from meshrl.view.mesh.snapshot import MeshSnapshot, Rows, read_mesh
from meshrl.view.mesh.workers import WorkerLine, lines

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


class MeshWatcher:
    """Looks at all jobs of a mesh that go on, and at those that have ended since it began."""

    def __init__(self, state: State, root: str) -> None:
        self._state, self._root, self._began = state, root, time.monotonic()
        self._shown: set[str] = set()
        self._steps: dict[str, Rows] = {}
        self._rates: dict[str, TokenRate] = {}
        self._rolled_out: dict[str, float] = {}
        self.mesh = MeshSnapshot()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    async def look(self) -> MeshSnapshot:
        """The mesh now. StateUnavailable, DeadlineExceeded."""
        found = await read_mesh(self._state)
        rows = [row for row in found.jobs if not row.ended or row.id in self._shown]
        for row in rows:
            if row.ended and row.id in self._steps:
                continue
            # Rows that a new lineage has left behind are gone.
            known = [r for r in self._steps.get(row.id, ()) if int(r["step"]) <= row.steps_done]
            last = int(known[-1]["step"]) if known else max(0, row.steps_done - CURVE)
            if last < row.steps_done:
                known += await steps.step_rows(self._state, row.id, since=last)
            self._steps[row.id] = known[-CURVE:]
        self._shown |= {row.id for row in rows}
        self.mesh = replace(found, jobs=rows, steps=dict(self._steps))
        for row in rows:
            tokens = sum(float(e.stats.get("tokens", 0)) for e in shards_of(self.mesh, row.id))
            rate = self._rates.setdefault(row.id, TokenRate())
            self._rolled_out[row.id] = rate.see(self.elapsed_s, tokens)
        return self.mesh

    async def watch(self) -> Self:
        """Look, for a view of the mesh and its frame."""
        await self.look()
        return self

    def frame(self, judged: Sequence[Judged] = ()) -> Frame:
        """The last look as a frame."""
        return frame(self.mesh, self._rolled_out, self._root, judged)


def frame(
    mesh: MeshSnapshot,
    rolled_out: Mapping[str, float],
    root: str,
    judged: Sequence[Judged] = (),
) -> Frame:
    """The frame of a snapshot. `rolled_out`: tokens/s by job, which takes several snapshots."""
    placed = list(lines(mesh))
    jobs = {resident.id: resident.job for _, resident in mesh.residents}
    by_resident: dict[str, list[WorkerLine]] = {}
    for line in placed:
        by_resident.setdefault(line.resident, []).append(line)
    stats = mesh.stats
    return Frame(
        root,
        jobs=tuple(_job(row, mesh, rolled_out.get(row.id, 0.0)) for row in mesh.jobs),
        residents=tuple(
            _resident(gang, resident, by_resident.get(resident.id, ()), stats)
            for gang, resident in mesh.residents
        ),
        idle=tuple(line.worker for line in placed if line.state == "idle"),
        lost=tuple(dict.fromkeys(line.worker for line in placed if line.state == "lost")),
        hosts=tuple(hosts(mesh.entries)),
        moves=tuple(_move(move, jobs.get(move.id, ""), mesh.now_ms) for move in mesh.moves),
        judged=tuple(judged),
    )


def shards_of(mesh: MeshSnapshot, job: str) -> list[Entry]:
    """The rollout shards of a job that live."""
    return [e for e in mesh.entries if e.alive and e.kind == "rollout" and owner(e) == job]


def _job(row: JobRow, mesh: MeshSnapshot, rolled_out_s: float) -> JobFrame:
    rows: Rows = mesh.steps.get(row.id, ())
    shards = shards_of(mesh, row.id)
    engines = [e for e in mesh.entries if e.alive and e.kind == "engine" and owner(e) == row.id]
    stands = row.ended or bool(row.held)
    rewards = tuple(float(step["reward"]) for step in rows)
    committed_ms = [int(step["committed_ms"]) for step in rows if "committed_ms" in step]
    return JobFrame(
        job=row.id,
        phase=row.phase.value,
        held="" if row.ended else row.held,
        quiet=quiet_text(row, mesh.renewed_ms),
        error=row.error,
        step=row.steps_done,
        steps=int(row.document["budget"]["steps"]),
        steps_per_min=None if stands else steps_per_min(committed_ms, mesh.renewed_ms),
        reward=rewards[-1] if rewards else None,
        rewards=rewards,
        workers=len(mesh.workers_of(row.id)),
        entitled=None if row.ended else mesh.entitled.get(row.id),
        rolled_out_s=0.0 if row.ended else rolled_out_s,
        trained_s=0.0 if row.ended else trained_rate(rows),
        in_flight=_sum(shards, "in_flight"),
        running=_sum(engines, "running"),
        waiting=_sum([*engines, *shards], "waiting"),
        wait_share=wait_share(rows),
        now=None if stands else mesh.explained.get(row.id),
    )


def _sum(entries: Sequence[Entry], figure: str) -> int:
    return sum(int(entry.stats.get(figure, 0)) for entry in entries)


def _resident(
    gang: Gang,
    resident: Resident,
    ranks: Sequence[WorkerLine],
    said: Mapping[str, Mapping[str, Any]],
) -> ResidentFrame:
    core = resident.core and resident.role == Role.TRAINING
    tensor_parallel = said.get(role_process(resident), {}).get("tensor_parallel")
    lost = any(line.state == "lost" for line in ranks)
    return ResidentFrame(
        gang=gang.id,
        resident=resident.id,
        workers=tuple(gang.workers[rank] for rank in resident.ranks),
        job=resident.job,
        role="core" if core else str(resident.role),
        tier=next((str(line.tier) for line in ranks if line.tier != line.wanted), resident.tier),
        wanted=str(resident.tier),
        state="lost" if lost else str(resident.doing),
        tensor_parallel=None if tensor_parallel is None else int(tensor_parallel),
        doing=next((line.doing for line in ranks if line.doing), ""),
    )


def hosts(entries: Sequence[Entry]) -> list[HostFrame]:
    """The hosts whose agents tell of their processors, by name."""
    nodes = [e for e in entries if e.alive and e.kind == "node"]
    told = [(e.host, NodeStats.of(e.stats)) for e in sorted(nodes, key=lambda e: e.host)]
    return [
        HostFrame(host, float(stats.cores), float(stats.busy_cores or 0.0))
        for host, stats in told
        if stats.cores
    ]


def _move(move: Move, job: str, now_ms: float) -> MoveFrame:
    told, predicted = move.details, move.details.get("predicted_s")
    return MoveFrame(
        gang=move.gang,
        resident=move.id,
        job=job or str(move.back.get("job", "")),
        was=str(told.get("from", move.back.get("role", ""))),
        to=str(told.get("to", "")),
        rule=str(told.get("policy", "")),
        since_s=round(max(0.0, now_ms - move.started_ms) / 1000, 1),
        left_s=round(max(0.0, move.until_ms - now_ms) / 1000, 1),
        predicted_s=None if predicted is None else float(predicted),
    )
