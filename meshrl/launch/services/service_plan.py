"""Process plan of a mesh: one list, used by the launcher and by `--dry-run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.job.config import JobConfig
from meshrl.common.state.pool.demand.requirements import shares_core_worker, shares_scoring_worker
from meshrl.common.state.pool.scheduling.host_services import ALL_SERVICES, format_services
from meshrl.common.state.pool.workers import process_names
from meshrl.common.state.pool.workers.rows import Role

PLANNERS = 2  # the second takes over when the first one's lease ends
# Imports of the fork server: all that services, role processes and environment processes have in
# common, and what they would import later: to look a host up, to restore a trainer's state, for its
# first step and its figures. Nothing that starts a thread or touches a GPU on import, and no code
# of a job's author.
PRELOADED_MODULES = (
    "meshrl.services.planner.planner",
    "meshrl.services.weights.store",
    "meshrl.services.sandbox.actor",
    "meshrl.services.node.agent",
    "meshrl.services.node.worker",
    "meshrl.services.rollout.shard",
    "meshrl.services.environment.environments",
    "meshrl.services.scoring.role_process",
    "meshrl.services.engine.role_process",
    "meshrl.services.trainer.role_process",
    "meshrl.services.trainer.gang.rank_process",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "numpy.ctypeslib",
    "numpy.ma",
    "encodings.idna",
)


@dataclass(frozen=True)
class ServiceSpec:
    """Process that the launcher starts and watches; `name` is its name in the registry."""

    name: str
    argv: tuple[str, ...]
    purpose: str


def build_fork_server_command(socket_path: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "meshrl.common.mesh.process.forking.fork_server",
        str(socket_path),
        *PRELOADED_MODULES,
    ]


def plan_services(
    workers: int, device: str, host: str, accepted_services: Sequence[str] = ALL_SERVICES
) -> list[ServiceSpec]:
    """Return the services of a mesh in the order of their start; they stop in the reverse order.

    Shards and sandboxes belong to a job: the host's agent starts them.
    """

    return [
        *(make_planner(f"planner/{i}", i > 0) for i in range(PLANNERS)),
        _make_service("weights", "meshrl.services.weights", "weight versions and finished groups"),
        make_agent(host, workers, device, accepted_services),
    ]


# Ports that a worker takes, with a role process, and a job, with its shard and its sandbox.
PORTS_PER_WORKER, PORTS_PER_JOB = 2, 2


def count_head_ports(workers: int) -> int:
    """Return the number of ports that the processes of a head take with one job.

    These are Redis, the gateway and its front, the weight store and its bulk bytes, the agent and
    its own, and the planners.
    """
    return 7 + PLANNERS + PORTS_PER_WORKER * workers + PORTS_PER_JOB


def count_host_ports(workers: int) -> int:
    """Return the ports of a joined host: the agent, its bulk bytes and a standby planner."""
    return 3 + PORTS_PER_WORKER * workers + PORTS_PER_JOB


def make_planner(name: str, is_standby: bool) -> ServiceSpec:
    purpose = "on standby" if is_standby else "places instances on workers"
    return _make_service(name, "meshrl.services.planner", purpose, "--name", name)


def make_agent(
    host: str,
    workers: int,
    device: str,
    accepted_services: Sequence[str] = ALL_SERVICES,
    *options: str,
) -> ServiceSpec:
    """Return the agent of a host that accepts these services; `options` are more of its own."""
    return _make_service(
        process_names.agent_name(host),
        "meshrl.services.node",
        f"starts and watches {workers} worker{'s' * (workers != 1)}, and the shards and sandboxes "
        "of jobs",
        *(
            "--workers",
            str(workers),
            "--device",
            device,
            "--services",
            format_services(accepted_services),
        ),
        *options,
    )


def _make_service(name: str, module: str, purpose: str, *arguments: str) -> ServiceSpec:
    return ServiceSpec(name, (sys.executable, "-m", module, *arguments), purpose)


def make_gateway(listen: str, advertise: str) -> ServiceSpec:
    words = ("--listen", listen, "--advertise", advertise)
    return _make_service(
        "gateway", "meshrl.services.gateway", "the endpoint for clients with a token", *words
    )


def plan_job_services(config: JobConfig) -> list[ServiceSpec]:
    """Return the services of the mesh that `meshrl run` starts for a job."""
    return plan_services(config.mesh.workers, config.mesh.device, "*")


def describe_processes(config: JobConfig) -> list[tuple[str, str]]:
    """Return (process, description) of everything that `meshrl run` would start."""
    shards = config.rollout.shards
    rows = [
        ("redis", "state; every write is on disk before it is acknowledged"),
        ("fork server", "imports the modules of other processes and forks them in milliseconds"),
    ]
    rows += [(s.name, s.purpose) for s in plan_job_services(config)]
    rows += [
        (process_names.shard_name(config.name, i), "trajectories, from prompt to reward")
        for i in range(shards)
    ]
    rows += [
        (
            process_names.sandbox_name(config.name, i),
            "tools and rewards in killable processes; model code in jails",
        )
        for i in range(config.sandbox_count)
    ]
    for i in range(config.mesh.workers):
        rows.append((process_names.worker_name(f"w{i}"), _describe_worker(i, config)))
    if config.environment.use:
        count = config.environment.processes
        rows.append(("environments", f"{count} for each rollout shard: {config.environment.use}"))
    return rows


def _describe_worker(worker_index: int, config: JobConfig) -> str:
    """Return the initial role of a worker in a mesh of one job."""
    ranks = config.training.ranks
    slot = f"{config.mesh.device} slot"
    if 0 < worker_index < ranks:
        return f"{slot}; rank {worker_index} of the core"
    helpers = worker_index - ranks + 1 if worker_index else 0  # gangs that train, beside the core's
    has_scoring, has_engine = shares_scoring_worker(config), shares_core_worker(config)
    if worker_index == 0 and (has_scoring or has_engine):
        roles = "core, engine" if has_scoring and has_engine else "core"
        return f"{slot}; {roles} and {'frozen models' if has_scoring else 'engine'}, in time slices"
    if helpers < config.planner.training:
        return f"{slot}; starts in the {Role.TRAINING} role"
    if helpers == config.planner.training and config.models.models_by_role and not has_scoring:
        return f"{slot}; starts in the {Role.SCORING} role"
    return f"{slot}; starts in the {Role.ROLLOUT} role"
