"""Figures of a mesh at one moment for `meshrl top` and `watch`, made from its snapshots.

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
from meshrl.common.state.pool.scheduling.snapshot import Move
from meshrl.common.state.pool.store.planner_reports import JobPrediction, MoveOutcome
from meshrl.common.state.pool.workers.process_names import role_process_name
from meshrl.common.state.pool.workers.rows import Gang, Instance, Role
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry
from meshrl.view.mesh.job_progress import describe_no_progress
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot, StepRows, read_mesh_snapshot
from meshrl.view.mesh.process_usage import find_owner_job
from meshrl.view.mesh.rates import (
    TokenRate,
    compute_steps_per_min,
    compute_trained_rate,
    compute_wait_share,
    is_supervised_step,
)
from meshrl.view.mesh.slice_frames import GangSlicesFrame
from meshrl.view.mesh.worker_lines import WorkerLine, list_worker_lines

CURVE_STEPS = 24  # rewards of the last steps


@dataclass(frozen=True)
class JobFrame:
    """Job's state, rates and prediction."""

    job: str
    phase: str
    phase_text: str  # for people
    block_reason: str  # `waiting: WHY` or `paused: WHY`; empty: it runs, or has ended
    no_progress_reason: str  # for how long it has made no progress, if that is too long
    error: str
    step: int
    steps: int
    steps_per_min: float | None = None  # None: too early to say
    reward: float | None = None  # reward of the last step; None: none yet, or a supervised job
    loss: float | None = None  # loss of the last step of a supervised job
    rewards: tuple[float, ...] = ()
    workers: int | None = None  # workers of the job; None: not reported
    entitled: int | None = None  # workers that it is entitled to
    rollout_tokens_per_s: float | None = None  # tokens/s
    trained_tokens_per_s: float | None = None
    in_flight: int | None = None  # trajectories
    running: int | None = None  # requests in its engines that are computed
    waiting: int | None = None  # requests that wait for an engine, or in one
    wait_share: float | None = None  # of the trainer's time, for trajectories
    prediction: JobPrediction | None = None


@dataclass(frozen=True)
class InstanceFrame:
    """Instance on all the workers that it occupies."""

    gang: str
    instance: str
    workers: tuple[str, ...]
    job: str
    role: str  # the core of a training is `core`
    tier: str  # tier of its tensors
    desired_tier: str  # desired tier of its tensors
    state: str
    tensor_parallel: int | None  # of its engine; None: it has none, or that is not known
    activity: str


@dataclass(frozen=True)
class HostFrame:
    """Host whose agent reports the load of its processors."""

    host: str
    cores: float
    busy_cores: float


@dataclass(frozen=True)
class MoveFrame:
    """Move that is under way."""

    gang: str
    instance: str
    job: str
    from_role: str
    to_role: str
    rule: str
    elapsed_s: float
    remaining_s: float  # until it is undone, if it is not complete by then
    predicted_s: float | None  # seconds a step, after it


@dataclass(frozen=True)
class MeshFrame:
    """Frame of a mesh at one moment."""

    mesh: str
    jobs: tuple[JobFrame, ...] = ()
    instances: tuple[InstanceFrame, ...] = ()
    idle: tuple[str, ...] = ()  # workers without instances
    lost: tuple[str, ...] = ()  # workers whose process has ended
    hosts: tuple[HostFrame, ...] = ()
    moves: tuple[MoveFrame, ...] = ()
    move_outcomes: tuple[
        MoveOutcome, ...
    ] = ()  # the last moves, by what came of them; oldest first
    slices: tuple[GangSlicesFrame, ...] = ()  # of gangs in time slices


class MeshWatcher:
    """Watcher of a mesh's live jobs, and of those that have ended since its start."""

    def __init__(self, state: StateClient, root: str) -> None:
        self._state, self._root, self._started_s = state, root, time.monotonic()
        self._shown_jobs: set[str] = set()
        self._steps: dict[str, StepRows] = {}
        self._rates: dict[str, TokenRate] = {}
        self._rollout_rates: dict[str, float] = {}
        self.mesh = MeshSnapshot()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the watcher."""
        return time.monotonic() - self._started_s

    async def poll(self) -> MeshSnapshot:
        """Return a new snapshot of the mesh. Raises StateUnavailable, DeadlineExceeded."""
        found = await read_mesh_snapshot(self._state)
        rows = [row for row in found.jobs if not row.is_terminal or row.id in self._shown_jobs]
        for row in rows:
            if row.is_terminal and row.id in self._steps:
                continue
            # Rows that a new lineage has abandoned are removed.
            known = [r for r in self._steps.get(row.id, ()) if int(r["step"]) <= row.steps_done]
            last = int(known[-1]["step"]) if known else max(0, row.steps_done - CURVE_STEPS)
            if last < row.steps_done:
                known += await steps.read_step_rows(self._state, row.id, after_step=last)
            self._steps[row.id] = known[-CURVE_STEPS:]
        self._shown_jobs |= {row.id for row in rows}
        self.mesh = replace(found, jobs=rows, steps=dict(self._steps))
        for row in rows:
            tokens = sum(float(e.stats.get("tokens", 0)) for e in find_shards(self.mesh, row.id))
            rate = self._rates.setdefault(row.id, TokenRate())
            self._rollout_rates[row.id] = rate.update(self.elapsed_s, tokens)
        return self.mesh

    async def refresh(self) -> Self:
        """Poll, for a view of the mesh and its frame."""
        await self.poll()
        return self

    def build_frame(
        self,
        outcomes: Sequence[MoveOutcome] = (),
        slices: tuple[GangSlicesFrame, ...] = (),
    ) -> MeshFrame:
        """Return the last snapshot as a frame."""
        frame = build_frame(self.mesh, self._rollout_rates, self._root, outcomes)
        return replace(frame, slices=slices)


def build_frame(
    mesh: MeshSnapshot,
    rollout_rates: Mapping[str, float],
    root: str,
    outcomes: Sequence[MoveOutcome] = (),
) -> MeshFrame:
    """Return the frame of a snapshot.

    `rollout_rates`: tokens/s by job, which take several snapshots.
    """
    placed = list(list_worker_lines(mesh))
    jobs = {resident.id: resident.job for _, resident in mesh.instances}
    by_resident: dict[str, list[WorkerLine]] = {}
    for line in placed:
        by_resident.setdefault(line.instance, []).append(line)
    stats = mesh.stats
    return MeshFrame(
        root,
        jobs=tuple(
            _build_job_frame(row, mesh, rollout_rates.get(row.id, 0.0)) for row in mesh.jobs
        ),
        instances=tuple(
            _build_instance_frame(gang, resident, by_resident.get(resident.id, ()), stats)
            for gang, resident in mesh.instances
        ),
        idle=tuple(line.worker for line in placed if line.state == "idle"),
        lost=tuple(dict.fromkeys(line.worker for line in placed if line.state == "lost")),
        hosts=tuple(build_host_frames(mesh.entries)),
        moves=tuple(
            _build_move_frame(move, jobs.get(move.id, ""), mesh.now_ms)
            for move in mesh.moves_in_progress
        ),
        move_outcomes=tuple(outcomes),
    )


def find_shards(mesh: MeshSnapshot, job: str) -> list[RegistryEntry]:
    """Return the live rollout shards of a job."""
    return [e for e in mesh.entries if e.alive and e.kind == "rollout" and find_owner_job(e) == job]


def _build_job_frame(row: JobRow, mesh: MeshSnapshot, rollout_tokens_per_s: float) -> JobFrame:
    rows: StepRows = mesh.steps.get(row.id, ())
    shards = find_shards(mesh, row.id)
    engines = [
        e for e in mesh.entries if e.alive and e.kind == "engine" and find_owner_job(e) == row.id
    ]
    is_halted = row.is_terminal or bool(row.block_reason)
    is_supervised = bool(rows) and is_supervised_step(rows[-1])
    rewards = () if is_supervised else tuple(float(step["reward"]) for step in rows)
    committed_ms = [int(step["committed_ms"]) for step in rows if "committed_ms" in step]
    return JobFrame(
        job=row.id,
        phase=row.phase.value,
        phase_text=row.phase_text,
        block_reason="" if row.is_terminal else row.block_reason,
        no_progress_reason=describe_no_progress(row, mesh.last_renewed_ms),
        error=row.error,
        step=row.steps_done,
        steps=int(row.document["budget"]["steps"]),
        steps_per_min=None
        if is_halted
        else compute_steps_per_min(committed_ms, mesh.last_renewed_ms),
        reward=rewards[-1] if rewards else None,
        loss=float(rows[-1]["loss"]) if is_supervised else None,
        rewards=rewards,
        workers=len(mesh.find_workers(row.id)),
        entitled=None if row.is_terminal else mesh.entitlements.get(row.id),
        rollout_tokens_per_s=0.0 if row.is_terminal else rollout_tokens_per_s,
        trained_tokens_per_s=0.0 if row.is_terminal else compute_trained_rate(rows),
        in_flight=_sum_stat(shards, "in_flight"),
        running=_sum_stat(engines, "running"),
        waiting=_sum_stat([*engines, *shards], "waiting"),
        wait_share=compute_wait_share(rows),
        prediction=None if is_halted else mesh.predictions.get(row.id),
    )


def _sum_stat(entries: Sequence[RegistryEntry], key: str) -> int:
    return sum(int(entry.stats.get(key, 0)) for entry in entries)


def _build_instance_frame(
    gang: Gang,
    instance: Instance,
    ranks: Sequence[WorkerLine],
    stats: Mapping[str, Mapping[str, Any]],
) -> InstanceFrame:
    core = instance.core and instance.role == Role.TRAINING
    tensor_parallel = stats.get(role_process_name(instance), {}).get("tensor_parallel")
    is_lost = any(line.state == "lost" for line in ranks)
    return InstanceFrame(
        gang=gang.id,
        instance=instance.id,
        workers=tuple(gang.workers[rank] for rank in instance.ranks),
        job=instance.job,
        role="core" if core else str(instance.role),
        tier=next(
            (str(line.tier) for line in ranks if line.tier != line.desired_tier), instance.tier
        ),
        desired_tier=str(instance.tier),
        state="lost" if is_lost else str(instance.phase),
        tensor_parallel=None if tensor_parallel is None else int(tensor_parallel),
        activity=next((line.activity for line in ranks if line.activity), ""),
    )


def build_host_frames(entries: Sequence[RegistryEntry]) -> list[HostFrame]:
    """Return the hosts whose agents report their processors, by name."""
    nodes = [e for e in entries if e.alive and e.kind == "node"]
    host_stats = [(e.host, NodeStats.decode(e.stats)) for e in sorted(nodes, key=lambda e: e.host)]
    return [
        HostFrame(host, float(stats.cores), float(stats.busy_cores or 0.0))
        for host, stats in host_stats
        if stats.cores
    ]


def _build_move_frame(move: Move, job: str, now_ms: float) -> MoveFrame:
    details, predicted = move.details, move.details.get("predicted_s")
    return MoveFrame(
        gang=move.gang,
        instance=move.id,
        job=job or str(move.rollback.get("job", "")),
        from_role=str(details.get("from", move.rollback.get("role", ""))),
        to_role=str(details.get("to", "")),
        rule=str(details.get("policy", "")),
        elapsed_s=round(max(0.0, now_ms - move.started_ms) / 1000, 1),
        remaining_s=round(max(0.0, move.deadline_ms - now_ms) / 1000, 1),
        predicted_s=None if predicted is None else float(predicted),
    )
