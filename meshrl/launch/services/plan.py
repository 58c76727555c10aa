"""The process plan of a mesh: one list, used by the launcher and by `--dry-run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.job.config import JobConfig
from meshrl.common.state.pool.placing.taking import ALL, written
from meshrl.common.state.pool.workers import names
from meshrl.common.state.pool.workers.rows import Role

PLANNERS = 2  # the second takes over when the first one's lease ends
# What the nursery has imported: all that services, role processes and environment processes have in
# common, and what they would import later: to look a host up, to restore a trainer's state, for its
# first step and its figures. Nothing that starts a thread or touches a GPU on import, and no code
# of a job's author.
NURSERY = (
    "meshrl.services.planner.planner",
    "meshrl.services.weights.store",
    "meshrl.services.sandbox.actor",
    "meshrl.services.node.agent",
    "meshrl.services.node.worker",
    "meshrl.services.rollout.shard",
    "meshrl.services.environment.environments",
    "meshrl.services.scoring.running",
    "meshrl.services.engine.running",
    "meshrl.services.trainer.running",
    "meshrl.services.trainer.gang.running",
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
    return [
        sys.executable,
        "-m",
        "meshrl.common.mesh.process.forking.nursery",
        str(socket),
        *NURSERY,
    ]


def services(workers: int, device: str, host: str, takes: Sequence[str] = ALL) -> list[Service]:
    """The services of a mesh in the order they start; they stop in the reverse order. Shards and
    sandboxes are a job's: the host's agent starts them.
    """

    return [
        *(planner(f"planner/{i}", i > 0) for i in range(PLANNERS)),
        _service("weights", "meshrl.services.weights", "weight versions and finished groups"),
        agent(host, workers, device, takes),
    ]


# Ports that a worker takes, with a role process, and a job, with its shard and its sandbox.
OF_A_WORKER, OF_A_JOB = 2, 2


def ports_of_head(workers: int) -> int:
    """Ports that the processes of a head take with one job: Redis, the gateway and its front, the
    weight store and its bulk bytes, the agent and its own, the planners.
    """
    return 7 + PLANNERS + OF_A_WORKER * workers + OF_A_JOB


def ports_of_host(workers: int) -> int:
    """Those of a host that joins: the agent and its bulk bytes, a planner that stands by."""
    return 3 + OF_A_WORKER * workers + OF_A_JOB


def planner(name: str, standby: bool) -> Service:
    purpose = "stands by" if standby else "decides who computes what where"
    return _service(name, "meshrl.services.planner", purpose, "--name", name)


def agent(
    host: str, workers: int, device: str, takes: Sequence[str] = ALL, *options: str
) -> Service:
    """The agent of a host that `takes` these services; `options` are more of its own."""
    return _service(
        names.agent(host),
        "meshrl.services.node",
        f"starts and watches {workers} workers, and the shards and sandboxes of jobs",
        *("--workers", str(workers), "--device", device, "--services", written(takes)),
        *options,
    )


def _service(name: str, module: str, purpose: str, *arguments: str) -> Service:
    return Service(name, (sys.executable, "-m", module, *arguments), purpose)


def gateway(listen: str, advertise: str) -> Service:
    words = ("--listen", listen, "--advertise", advertise)
    return _service("gateway", "meshrl.services.gateway", "the door for who holds a token", *words)


def services_of(config: JobConfig) -> list[Service]:
    """The services of the mesh that `meshrl run` starts for a job."""
    return services(config.mesh.workers, config.mesh.device, "*")


def described(config: JobConfig) -> list[tuple[str, str]]:
    """(process, what it does) of everything that `meshrl run` would start."""
    shards = config.rollout.shards
    rows = [
        ("redis", "state; every write is on disk before it is acknowledged"),
        ("nursery", "has imported what the others need; forks them in milliseconds"),
    ]
    rows += [(s.name, s.purpose) for s in services_of(config)]
    rows += [
        (names.shard(config.name, i), "trajectories, from prompt to reward") for i in range(shards)
    ]
    rows += [
        (names.sandbox(config.name, i), "tools and rewards, killable; the model's code in jails")
        for i in range(config.sandboxes)
    ]
    for i in range(config.mesh.workers):
        rows.append((names.worker_process(f"w{i}"), _starts_as(i, config)))
    if config.environment.use:
        count = config.environment.processes
        rows.append(("environments", f"{count} for each rollout shard: {config.environment.use}"))
    return rows


def _starts_as(worker: int, config: JobConfig) -> str:
    """What a worker begins with where the mesh is the job's alone."""
    ranks = config.training.ranks
    slot = f"{config.mesh.device} slot"
    if 0 < worker < ranks:
        return f"{slot}; rank {worker} of the core"
    helpers = worker - ranks + 1 if worker else 0  # gangs that train, beside the core's
    if helpers < config.planner.training:
        return f"{slot}; starts in the {Role.TRAINING} role"
    if helpers == config.planner.training and config.models.declared:
        return f"{slot}; starts in the {Role.SCORING} role"
    return f"{slot}; starts in the {Role.ROLLOUT} role"
