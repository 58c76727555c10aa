"""The names of processes that serve a job, as the registry has them. A name says whose it is."""

from __future__ import annotations

from meshrl.common.state.pool.workers.rows import Resident, Role

# Kinds of processes that the planner places.
PLACED = frozenset({"engine", "hybrid", "rank", "rollout", "sandbox", "scoring", "trainer"})
# Services that a host may take, by the kind of their processes; people say it in these words.
TAKEN = {"rollout": "shards", "sandbox": "sandboxes"}


def worker_process(worker: str) -> str:
    """The process of a worker."""
    return f"worker/{worker}"


def agent(host: str) -> str:
    """The agent of a host."""
    return f"node/{host}"


def role_process(resident: Resident, place: int = 0) -> str:
    """The process of a resident, the `place`-th of those that it has; a core's and frozen models'
    are called after their job, which has them once. An engine has one, and where it would have
    others its accelerators are kept for it under such a name.
    """
    if resident.role == Role.ROLLOUT:
        return f"engine/{resident.id}/{place}" if place else f"engine/{resident.id}"
    if resident.role == Role.SCORING:
        return f"scoring/{resident.job}"
    if not resident.core:
        return f"hybrid/{resident.id}"
    return f"rank/{resident.job}/{place}" if place else f"trainer/{resident.job}"


def shard(job: str, number: int) -> str:
    """A rollout shard of a job."""
    return f"rollout/{job}/{number}"


def sandbox(job: str, number: int) -> str:
    """A sandbox of a job."""
    return f"sandbox/{job}/{number}"


def service(name: str) -> tuple[str, str, int]:
    """(kind, job, number) of a shard's or a sandbox's name; -1 in one that is neither's, as anybody
    may write into the registry.
    """
    kind, _, rest = name.partition("/")
    job, _, number = rest.rpartition("/")
    return kind, job, int(number) if number.isdecimal() else -1
