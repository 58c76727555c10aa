"""The workers of a mesh as people see them: with gang, resident, role, tier and state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.state.pool.workers.names import role_process
from common.state.pool.workers.rows import Doing, Gang, Resident, Role, Tier, WorkerRow
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
        on_it = list(_residents(worker, gang))
        for resident in on_it:
            assert gang is not None
            line = _line(worker, gang, resident, stats)
            yield replace(line, gpu=gpu[worker.id], accelerator=where[worker.id])
        if not on_it:
            state = "idle" if worker.alive else "lost"
            name = gang.id if gang else ""
            yield WorkerLine(worker.id, where[worker.id], name, state=state, gpu=gpu[worker.id])


def worker_lines(mesh: MeshSnapshot, job: str) -> list[WorkerLine]:
    """What a job's view shows: the workers that serve it, with all that resides on them, and some
    idle ones.
    """
    serving = mesh.workers_of(job)
    every = list(lines(mesh))
    idle = [line for line in every if not line.resident][:IDLE_SHOWN]
    return [line for line in every if line.worker in serving or line in idle]


def worker_sums(mesh: MeshSnapshot, job: str) -> WorkerSums:
    """How many workers `worker_lines` leaves out."""
    serving = mesh.workers_of(job)
    every = list(lines(mesh))
    idle = sum(not line.resident for line in every)
    busy = {line.worker for line in every if line.resident} - serving
    return WorkerSums(len(busy), max(0, idle - IDLE_SHOWN))


def _residents(worker: WorkerRow, gang: Gang | None) -> Iterator[Resident]:
    if gang is not None:
        rank = gang.workers.index(worker.id)
        yield from (resident for resident in gang.residents if rank in resident.ranks)


def _line(
    worker: WorkerRow, gang: Gang, resident: Resident, stats: Mapping[str, Mapping[str, Any]]
) -> WorkerLine:
    rank = gang.workers.index(worker.id)
    report = resident.reports.get(rank)
    current = report is not None and report.generation == resident.generation
    doing = report.doing if report is not None and current else Doing.STARTING
    return WorkerLine(
        worker=worker.id,
        accelerator=worker.accelerator,
        gang=gang.id,
        resident=resident.id,
        job=resident.job,
        role=resident.role,
        tier=report.tier if report is not None and current else Tier.ABSENT,
        wanted=resident.tier,
        state=str(doing) if worker.alive else "lost",
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
