"""Registry names of the processes that serve a job. A name identifies its job."""

from __future__ import annotations

from meshrl.common.state.pool.workers.rows import Instance, Role

# Kinds of processes that the planner places.
PLACED_KINDS = frozenset({"engine", "hybrid", "rank", "rollout", "sandbox", "scoring", "trainer"})
# Names of services for users, by the kind of their processes.
SERVICE_NAMES = {"rollout": "shards", "sandbox": "sandboxes"}


def worker_name(worker: str) -> str:
    """Return the name of a worker's process."""
    return f"worker/{worker}"


def agent_name(host: str) -> str:
    """Return the name of a host's agent."""
    return f"node/{host}"


def role_process_name(instance: Instance, index: int = 0) -> str:
    """Return the name of an instance's `index`-th process.

    Processes of a core and of frozen models are named after their job, which has them once. An
    engine has one process; further accelerators of the engine are reserved under an indexed name.
    """
    if instance.role == Role.ROLLOUT:
        return f"engine/{instance.id}/{index}" if index else f"engine/{instance.id}"
    if instance.role == Role.SCORING:
        return f"scoring/{instance.job}"
    if not instance.core:
        return f"hybrid/{instance.id}"
    return f"rank/{instance.job}/{index}" if index else f"trainer/{instance.job}"


def shard_name(job: str, number: int) -> str:
    """Return the name of a rollout shard of a job."""
    return f"rollout/{job}/{number}"


def sandbox_name(job: str, number: int) -> str:
    """Return the name of a sandbox of a job."""
    return f"sandbox/{job}/{number}"


def parse_service_name(name: str) -> tuple[str, str, int]:
    """Return (kind, job, number) of a shard's or a sandbox's name.

    The number is -1 in any other name: any process may write into the registry.
    """
    kind, _, rest = name.partition("/")
    job, _, number = rest.rpartition("/")
    return kind, job, int(number) if number.isdecimal() else -1
