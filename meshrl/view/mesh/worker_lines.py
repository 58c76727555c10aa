"""Workers of a mesh for people: with gang, instance, role, tier and state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshrl.common.state.pool.workers.process_names import role_process_name
from meshrl.common.state.pool.workers.rows import Instance, InstancePhase, Role, Tier
from meshrl.view.mesh import gpu_status
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot

MAX_IDLE_SHOWN = 8  # idle workers in a job's view; the others are only counted


@dataclass(frozen=True)
class WorkerLine:
    """Instance on a worker, or an idle worker, as one line."""

    worker: str
    accelerator: str  # and its host, where there are several: gpu2-1f3a9c/cuda:0
    gang: str = ""
    instance: str = ""
    job: str = ""
    role: Role = Role.IDLE
    tier: Tier = Tier.ABSENT  # tier of its tensors
    desired_tier: Tier = Tier.ABSENT  # desired tier of its tensors
    state: str = "idle"  # starting | ready | moving | draining | failed | lost ...
    activity: str = ""  # "31 running, version 12"
    gpu_text: str = ""  # its figures: "62 of 80 GiB, 97 %"


@dataclass(frozen=True)
class HiddenWorkers:
    """Counts of the workers that a job's view does not show."""

    busy_elsewhere: int = 0  # workers that serve only other jobs
    idle: int = 0


def list_worker_lines(mesh: MeshSnapshot) -> Iterator[WorkerLine]:
    """Yield all instances on all workers, and the idle workers, by worker."""
    stats = mesh.stats
    gpu = {
        worker.id: gpu_status.format_gpu(gpu_status.read_gpu_stats(worker, stats))
        for worker in mesh.workers
    }
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
            gpu_text=gpu[worker.id],
        )
        instances = [r for r in gang.instances if rank in r.ranks] if gang else []
        yield from (_make_line(idle, resident, rank, stats) for resident in instances)
        if not instances:
            yield idle


def select_worker_lines(mesh: MeshSnapshot, job: str) -> tuple[list[WorkerLine], HiddenWorkers]:
    """Return the lines of a job's view, and the counts of hidden workers.

    The view has the workers that serve the job, with all their instances, and some idle ones.
    """
    serving = mesh.find_workers(job)
    every = list(list_worker_lines(mesh))
    idle = [line for line in every if not line.instance]
    busy = {line.worker for line in every if line.instance} - serving
    displayed = [line for line in every if line.worker in serving or line in idle[:MAX_IDLE_SHOWN]]
    return displayed, HiddenWorkers(len(busy), max(0, len(idle) - MAX_IDLE_SHOWN))


def _make_line(
    idle: WorkerLine, instance: Instance, rank: int, stats: Mapping[str, Mapping[str, Any]]
) -> WorkerLine:
    """Return the line of a worker with an instance on it."""
    report = instance.reports.get(rank)
    current = report is not None and report.generation == instance.generation
    phase = report.phase if report is not None and current else InstancePhase.STARTING
    return replace(
        idle,
        instance=instance.id,
        job=instance.job,
        role=instance.role,
        tier=report.tier if report is not None and current else Tier.ABSENT,
        desired_tier=instance.tier,
        state=str(phase) if idle.state != "lost" else "lost",
        activity=_describe_activity(
            instance, rank, stats, report.tier if report and current else None
        ),
    )


def _describe_activity(
    instance: Instance, rank: int, stats: Mapping[str, Mapping[str, Any]], tier: Tier | None
) -> str:
    """Return the activity of the instance's process, in a few words."""
    if tier in (Tier.MEMORY, Tier.DISK):
        return "asleep"
    if instance.role == Role.TRAINING:
        return ("core" if not rank else f"core, rank {rank}") if instance.core else "hybrid"
    if instance.role == Role.SCORING:
        return "frozen models"
    instance_stats = stats.get(role_process_name(instance))
    if not instance_stats:
        return ""
    if starting := instance_stats.get("starting"):
        return str(starting)
    version = instance_stats.get("version", -1)
    version_text = "no version yet" if version < 0 else f"version {version}"
    return f"{instance_stats.get('running', 0)} running, {version_text}"
