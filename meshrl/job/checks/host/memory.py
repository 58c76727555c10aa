"""Memory that a job needs, and the memory of this host or its accelerators."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.generation.batch.cache_size import choose_auto_share, plan_cache_blocks
from meshrl.common.hardware.accelerators import load_accelerators
from meshrl.common.job.config import JobConfig
from meshrl.common.job.memory.cache_blocks import count_least_blocks
from meshrl.common.job.memory.plan import (
    JobModels,
    MemoryPlan,
    RoleCounts,
    count_least_bytes,
    plan_memory,
)
from meshrl.common.job.memory.process_memory import ProcessMemory, describe_bytes
from meshrl.common.job.memory.remedies import MemoryNeed, describe_remedies, find_remedies
from meshrl.common.mesh.process.diagnosis import host_limits
from meshrl.common.state.pool.demand.requirements import derive_requirements, shares_core_worker
from meshrl.job.checks.host.devices import list_devices
from meshrl.job.job_file import JobFile
from meshrl.job.model_files import load_models

GIB = 1 << 30


@dataclass(frozen=True)
class Room:
    """Memory of each accelerator, or of the host that a CPU mesh has."""

    size_bytes: int
    owner: str  # as in "<owner> has 80 GiB"
    is_host: bool = False

    def measure(self, plan: MemoryPlan) -> int:
        """Return the bytes of a plan that must fit."""
        return plan.least_host_bytes if self.is_host else count_least_bytes(plan.largest_worker)

    def holds(self, plan: MemoryPlan) -> bool:
        return self.measure(plan) <= self.size_bytes


def find_room(device: str, accelerator: str = "") -> Room | None:
    """Return the memory of this host's smallest GPU, of its CPU, or of a declared accelerator.

    `accelerator`: a kind such as H200, or a number of GiB. None: no GPU's memory is known.
    """
    if accelerator:
        return Room(_parse_accelerator(accelerator), f"an accelerator ({accelerator})")
    if device == "cuda":
        try:
            sizes = [one.memory_bytes for one in list_devices() if one.memory_bytes]
        except ConfigError:
            return None  # `check_devices` reports that
        return Room(min(sizes), "the smallest GPU") if sizes else None
    size_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = host_limits.read_memory_limit()
    return Room(min(size_bytes, limit) if limit else size_bytes, "this host", is_host=True)


def plan_job_memory(config: JobConfig, models: JobModels | None = None) -> MemoryPlan:
    """Return the memory of a job's processes on its own mesh.

    Raises ConfigError for an unreadable model.
    """
    return plan_memory(config, models or load_models(config), count_roles(config))


def limit_cache(config: JobConfig, plan: MemoryPlan, room: Room | None) -> MemoryPlan:
    """Return the plan with the cache that a built-in engine takes of an accelerator's memory."""
    engine, rollout = plan.engine, config.rollout
    if room is None or room.is_host or engine is None or rollout.kv_tokens:
        return plan
    if rollout.engine == "sglang" or rollout.cache_memory.size_bytes:
        return plan
    shared = plan.shares_core_worker  # the core has its parameters before the engine wakes
    held_bytes = max(one.masters + one.context for one in plan.core) if shared else 0
    free_bytes = room.size_bytes - held_bytes - (engine.total_bytes - engine.cache)
    share = rollout.cache_memory.share or choose_auto_share("cuda", is_time_sliced=shared)
    cache = plan_cache_blocks(
        max(free_bytes, engine.least_cache),
        share,
        engine.least_cache // count_least_blocks(rollout.max_tokens),
        rollout.slots,
        rollout.max_tokens,
    )
    return replace(plan, engine=replace(engine, cache=cache.size_bytes))


def count_roles(config: JobConfig) -> RoleCounts:
    """Return the numbers of processes with which a job begins on its own mesh."""
    requirements = derive_requirements(config.to_document())
    hybrids = config.planner.training - 1
    others = requirements.ranks + hybrids + requirements.needs_scoring
    degree = requirements.smallest_engine
    engines, is_shared = 0, shares_core_worker(config)
    if requirements.needs_rollout:
        free = (config.mesh.workers - others) // degree
        engines = requirements.ranks if is_shared else max(1, free)
    return RoleCounts(engines, degree, hybrids if requirements.allows_hybrids else 0, is_shared)


def check_memory(job: JobFile, accelerator: str = "") -> None:
    """Check that the job fits into the memory of each GPU, or of this host.

    The error has the bytes by kind, and the keys that suffice, each of which was tried.
    """
    config = job.config
    if accelerator:
        config = replace(config, mesh=replace(config.mesh, device="cuda"))
    room = find_room(config.mesh.device, accelerator)
    if room is None:
        return
    models = load_models(config)
    plan = plan_job_memory(config, models)
    if room.holds(plan):
        return

    def measure(changed: JobConfig) -> MemoryNeed:
        found = plan_job_memory(changed, models)
        return MemoryNeed(room.measure(found), room.holds(found))

    processes = plan.processes if room.is_host else plan.largest_worker
    names = " and ".join(_describe_process(one, room.is_host) for one in processes)
    raise job.make_error(
        _choose_key(plan, processes),
        f"the job does not fit: {names} need at least {describe_bytes(room.measure(plan))}, and "
        f"{room.owner} has {describe_bytes(room.size_bytes)}",
        describe_remedies(find_remedies(config, measure)),
    )


def explain_excess(room: Room | None, plan: MemoryPlan) -> str:
    """Return why a job may run out of memory, though it may fit; empty without a doubt."""
    if room is None:
        return ""
    needed_bytes = (
        sum(one.count * one.required_bytes for one in plan.processes)
        if room.is_host
        else max(sum(one.required_bytes for one in worker) for worker in plan.by_worker)
    )
    if needed_bytes <= room.size_bytes:
        return ""
    return (
        f"the job may need {describe_bytes(needed_bytes)}, and {room.owner} has "
        f"{describe_bytes(room.size_bytes)}. Lower rollout.slots, rollout.max_tokens or "
        "training.bin_tokens, or set training.activation_checkpointing or lora.rank"
    )


def _describe_process(process: ProcessMemory, counts: bool) -> str:
    """Return a process with its minimum by kind, the largest first."""
    least = process.bytes_by_kind | {"cache": process.least_cache}
    sizes = sorted(least.items(), key=lambda pair: -pair[1])
    kinds = ", ".join(f"{kind} {describe_bytes(size)}" for kind, size in sizes if size)
    number = f"{process.count} x " if counts and process.count > 1 else ""
    return f"{number}{process.process} ({kinds})"


def _choose_key(
    plan: MemoryPlan, processes: list[ProcessMemory] | tuple[ProcessMemory, ...]
) -> str:
    """Return the key of the job file that an error points to."""
    if plan.shares_core_worker:
        return "mesh.workers"
    largest = max(processes, key=lambda one: one.least_bytes)
    if largest in plan.core:
        return "training.ranks"
    return "rollout.tensor_parallel" if largest is plan.engine else "models"


def _parse_accelerator(text: str) -> int:
    known = load_accelerators()
    if text in known:
        return int(known[text].memory_bytes)
    try:
        return int(float(text) * GIB)
    except ValueError as error:
        raise ConfigError(
            f"there is no accelerator {text!r}",
            where="--accelerator",
            fix=f"Use one of {', '.join(known)}, or its memory in GiB",
        ) from error
