"""The workers of a mesh as people see them: with gang, resident, role, tier and state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshrl.common.state.pool.workers.names import role_process
from meshrl.common.state.pool.workers.rows import Doing, Resident, Role, Tier
from meshrl.view.mesh import gpus
from meshrl.view.mesh.snapshot import MeshSnapshot

IDLE_SHOWN = 8  # idle workers in a job's view; of more it says how many there are


@dataclass(frozen=True)
class WorkerLine:
    """A resident on a worker, or an idle worker, in one line."""

    worker: str
    accelerator: str  # and its host, where there are several: gpu2-1f3a9c/cuda:0
    gang: str = ""
    resident: str = ""
    job: str = ""
    role: Role = Role.IDLE
    tier: Tier = Tier.ABSENT  # where its tensors are
    wanted: Tier = Tier.ABSENT  # where they are to be
    state: str = "idle"  # starting | ready | moving | draining | failed | lost ...
    doing: str = ""  # "31 running, version 12"
    gpu: str = ""  # how it does: "62 of 80 GiB, 97 %"


@dataclass(frozen=True)
class WorkerSums:
    """How many workers a job's view does not show."""

    others: int = 0  # they serve other jobs alone
    idle: int = 0


def lines(mesh: MeshSnapshot) -> Iterator[WorkerLine]:
    """All residents on all workers, and the idle workers, by worker."""
    stats = mesh.stats
    gpu = {worker.id: gpus.line(gpus.figures(worker, stats)) for worker in mesh.workers}
    gangs = {worker: gang for gang in mesh.gangs for worker in gang.workers}
    several = len({worker.host for worker in mesh.workers}) > 1
    where = {w.id: f"{w.host}/{w.accelerator}" if several else w.accelerator for w in mesh.workers}
    for worker in mesh.workers:
        gang = gangs.get(worker.id)
        rank = gang.workers.index(worker.id) if gang else 0
        idle = WorkerLine(
            worker.id,
            where[worker.id],
            gang.id if gang else "",
            state="idle" if worker.alive else "lost",
            gpu=gpu[worker.id],
        )
        on_it = [r for r in gang.residents if rank in r.ranks] if gang else []
        yield from (_occupied(idle, resident, rank, stats) for resident in on_it)
        if not on_it:
            yield idle


def worker_lines(mesh: MeshSnapshot, job: str) -> tuple[list[WorkerLine], WorkerSums]:
    """What a job's view shows: the workers that serve it, with all that resides on them, and some
    idle ones; and how many workers it leaves out.
    """
    serving = mesh.workers_of(job)
    every = list(lines(mesh))
    idle = [line for line in every if not line.resident]
    busy = {line.worker for line in every if line.resident} - serving
    shown = [line for line in every if line.worker in serving or line in idle[:IDLE_SHOWN]]
    return shown, WorkerSums(len(busy), max(0, len(idle) - IDLE_SHOWN))


def _occupied(
    idle: WorkerLine, resident: Resident, rank: int, stats: Mapping[str, Mapping[str, Any]]
) -> WorkerLine:
    """Return the line of a worker with a resident on it."""
    report = resident.reports.get(rank)
    current = report is not None and report.generation == resident.generation
    doing = report.doing if report is not None and current else Doing.STARTING
    return replace(
        idle,
        resident=resident.id,
        job=resident.job,
        role=resident.role,
        tier=report.tier if report is not None and current else Tier.ABSENT,
        wanted=resident.tier,
        state=str(doing) if idle.state != "lost" else "lost",
        doing=_does(resident, rank, stats, report.tier if report and current else None),
    )


def _does(
    resident: Resident, rank: int, stats: Mapping[str, Mapping[str, Any]], at: Tier | None
) -> str:
    """What its process does, in a few words."""
    if at in (Tier.MEMORY, Tier.DISK):
        return "asleep"
    if resident.role == Role.TRAINING:
        return ("core" if not rank else f"core, rank {rank}") if resident.core else "helper"
    if resident.role == Role.SCORING:
        return "frozen models"
    said = stats.get(role_process(resident))
    if not said:
        return ""
    return f"{said.get('running', 0)} running, version {said.get('version', '?')}"
