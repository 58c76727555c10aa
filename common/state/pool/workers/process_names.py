"""The names of processes that serve a job, as the registry has them. A name says whose it is."""

from __future__ import annotations

from meshrl.common.state.pool.workers.rows import Instance, Role

# Kinds of processes that the planner places.
PLACED_KINDS = frozenset({"engine", "hybrid", "rank", "rollout", "sandbox", "scoring", "trainer"})
# Services that a host may take, by the kind of their processes; people say it in these words.
SERVICE_NAMES = {"rollout": "shards", "sandbox": "sandboxes"}


def worker_name(worker: str) -> str:
    """The process of a worker."""
    return f"worker/{worker}"


def agent_name(host: str) -> str:
    """The agent of a host."""
    return f"node/{host}"


def role_process_name(instance: Instance, index: int = 0) -> str:
    """The process of a resident, the `index`-th of those that it has; a core's and frozen models'
    are called after their job, which has them once. An engine has one, and where it would have
    others its accelerators are kept for it under such a name.
    """
    if instance.role == Role.ROLLOUT:
        return f"engine/{instance.id}/{index}" if index else f"engine/{instance.id}"
    if instance.role == Role.SCORING:
        return f"scoring/{instance.job}"
    if not instance.core:
        return f"hybrid/{instance.id}"
    return f"rank/{instance.job}/{index}" if index else f"trainer/{instance.job}"


def shard_name(job: str, number: int) -> str:
    """A rollout shard of a job."""
    return f"rollout/{job}/{number}"


def sandbox_name(job: str, number: int) -> str:
    """A sandbox of a job."""
    return f"sandbox/{job}/{number}"


def parse_service_name(name: str) -> tuple[str, str, int]:
    """(kind, job, number) of a shard's or a sandbox's name; -1 in one that is neither's, as anybody
    may write into the registry.
    """
    kind, _, rest = name.partition("/")
    job, _, number = rest.rpartition("/")
    return kind, job, int(number) if number.isdecimal() else -1
