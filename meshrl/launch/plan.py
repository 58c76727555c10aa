"""The process plan of a mesh: one list, used by the launcher and by `--dry-run`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from common.job.config import JobConfig
from common.state.gangs import Role

PLANNERS = 2  # the second takes over when the first one's lease ends
# What the nursery has imported: all that services, role processes and environment processes have in
# common, and what they would import later: to look a host up, to restore a trainer's state, for its
# first step and its figures. Nothing that starts a thread or touches a GPU on import, and no code
# of a job's author.
NURSERY = (
    "services.planner.planner",
    "services.weights.store",
    "services.sandbox.actor",
    "services.node.agent",
    "services.node.worker",
    "services.rollout.shard",
    "services.environment.environments",
    "services.scoring.running",
    "services.engine.running",
    "services.trainer.running",
    "services.trainer.ranks.running",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "numpy.ctypeslib",
    "numpy.ma",
    "encodings.idna",
)


@dataclass(frozen=True)
class Service:
    """A process that the launcher starts and watches; `name` is its name in the registry."""

    name: str
    argv: tuple[str, ...]
    purpose: str


def nursery(socket: Path) -> list[str]:
    """The command line of a nursery at `socket`."""
    return [sys.executable, "-m", "common.process.nursery", str(socket), *NURSERY]


def services(
    workers: int, shards: int, device: str, host: str, ranks: int = 1, sandboxes: int = 1
) -> list[Service]:
    """The services of a mesh in the order they start; they stop in the reverse order. The first
    `ranks` workers make one gang.
    """

    def service(name: str, module: str, purpose: str, *arguments: str) -> Service:
        return Service(name, (sys.executable, "-m", module, *arguments), purpose)

    planners = [
        service(
            f"planner/{i}",
            "services.planner",
            "decides which gang has which role" if i == 0 else "stands by",
            "--name",
            f"planner/{i}",
        )
        for i in range(PLANNERS)
    ]
    rollouts = [
        service(
            f"rollout/{i}",
            "services.rollout",
            "trajectories, from prompt to reward",
            "--shard",
            str(i),
        )
        for i in range(shards)
    ]
    sandbox_services = [
        service(
            f"sandbox/{i}",
            "services.sandbox",
            "tools and rewards, killable; the model's code in jails",
            "--name",
            f"sandbox/{i}",
        )
        for i in range(sandboxes)
    ]
    return [
        *planners,
        service("weights", "services.weights", "weight versions and finished groups"),
        *sandbox_services,
        service(
            f"node/{host}",
            "services.node",
            f"starts and watches {workers} workers",
            "--workers",
            str(workers),
            "--device",
            device,
            *(["--ranks", str(ranks)] if ranks > 1 else []),
        ),
        *rollouts,
    ]


def services_of(config: JobConfig) -> list[Service]:
    """The services of the mesh that `meshrl run` starts for a job."""
    mesh, ranks = config.mesh, config.training.ranks
    sandboxes = config.sandbox.processes
    return services(mesh.workers, config.rollout.shards, mesh.device, "*", ranks, sandboxes)


def described(config: JobConfig) -> list[tuple[str, str]]:
    """(process, what it does) of everything that `meshrl run` would start."""
    ranks = config.training.ranks
    training = config.planner.training
    rows = [
        ("redis", "state; every write is on disk before it is acknowledged"),
        ("nursery", "has imported what the others need; forks them in milliseconds"),
    ]
    rows += [(s.name, s.purpose) for s in services_of(config)]
    for rank in range(1, ranks):
        rows.append((f"worker/g0.{rank}", f"{config.mesh.device} slot; rank {rank} of the core"))
    for i in range(config.mesh.workers - ranks + 1):
        scores = i == training and bool(config.models.declared)
        role = Role.TRAINING if i < training else Role.SCORING if scores else Role.ROLLOUT
        rows.append((f"worker/g{i}", f"{config.mesh.device} slot; starts in the {role} role"))
    if config.environment.use:
        count = config.environment.processes
        rows.append(("environments", f"{count} for each rollout shard: {config.environment.use}"))
    return rows
