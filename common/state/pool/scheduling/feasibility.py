"""Feasibility of a job: can it ever run on these workers without other jobs?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshrl.common.job.memory.process_memory import describe_bytes
from meshrl.common.state.pool.demand.requirements import JobRequirements, MarketLimits
from meshrl.common.state.pool.workers.rows import (
    MARKETS,
    Instance,
    Role,
    Tier,
    TierBytes,
    WorkerRow,
)
from meshrl.common.state.pool.workers.settings import PoolSettings

# Keys that lower the memory of a role.
MEMORY_KEYS = {
    "core": "training.ranks, training.bin_tokens, training.activation_checkpointing or lora.rank",
    "engine": "rollout.tensor_parallel, rollout.dtype, rollout.slots or rollout.max_tokens",
}


def estimate_accelerator_bytes(
    role: Role, core: bool, ranks: int, requirements: JobRequirements
) -> int:
    """Return the minimum bytes of each worker's accelerator for such an instance; 0: unknown."""
    memory = requirements.memory
    if role == Role.ROLLOUT:
        return memory.engines.get(ranks, 0)
    if role == Role.TRAINING:
        return memory.core if core else memory.hybrid
    return memory.scoring if role == Role.SCORING else 0


class SliceBytes(NamedTuple):
    """Bytes of an instance on each worker's accelerator, in time slices."""

    passes: int  # all its tensors, and what a pass computes beside them
    update: int  # all its tensors, and what an update of the optimizer computes beside them
    largest: int  # kinds of its largest function, and what this computes beside them

    @property
    def total(self) -> int:
        """Bytes of all its tensors, with what any function computes."""
        return max(self.passes, self.update)


def estimate_slice_bytes(
    role: Role, core: bool, ranks: int, requirements: JobRequirements
) -> SliceBytes:
    """Return the bytes of such an instance in time slices; 0: unknown."""
    total, memory = estimate_accelerator_bytes(role, core, ranks, requirements), requirements.memory
    if role != Role.TRAINING or not core or not memory.core_pass:
        return SliceBytes(total, total, total)
    largest = max(memory.core_pass - memory.core_moments, memory.core_update)
    return SliceBytes(memory.core_pass, memory.core_update, largest)


def count_shared_bytes(slices: Sequence[SliceBytes]) -> int:
    """Return the bytes of all tensors of instances that share a worker, while one computes."""
    idle = [min(one.passes, one.update) for one in slices]
    computed = (one.total - rest for one, rest in zip(slices, idle, strict=True))
    return sum(idle) + max(computed, default=0)


def estimate_offload_bytes(instance: Instance, requirements: JobRequirements) -> int:
    """Return the bytes of each worker's memory or disk that an offloaded core takes.

    Gradients are not offloaded. Ranks with experts only are assumed to hold nearly all parameters.
    """
    if not instance.core:
        return 0
    return requirements.memory.core_state // (len(instance.ranks) - requirements.attention_ranks)


def has_room(budget: TierBytes, tier: Tier, used_bytes: int, needed_bytes: int) -> bool:
    """Return True if a worker has `needed_bytes` free in that tier when `used_bytes` are taken."""
    if tier == Tier.ABSENT:
        return True
    limit = {
        Tier.ACCELERATOR: budget.accelerator,
        Tier.MEMORY: budget.memory,
        Tier.DISK: budget.disk,
    }[tier]
    return not limit or used_bytes + needed_bytes <= limit


def explain_no_residency(
    budget: TierBytes, slices: Sequence[SliceBytes], rest_bytes: int = 0
) -> str:
    """Return why instances cannot share a worker's accelerator by time slices; empty if they can.

    Only one function of one instance has a slice at a time, and its worker moves all other kinds to
    memory and disk: the accelerator must hold the largest function, and the three budgets together
    must hold all tensors. `rest_bytes` is already offloaded there by others. A budget or need of 0
    is unlimited, or unknown.
    """
    largest = max((one.largest for one in slices), default=0)
    total = count_shared_bytes(slices) + rest_bytes
    if budget.accelerator and largest > budget.accelerator:
        return (
            f"a slice needs {describe_bytes(largest)} of accelerator memory, and the worker has "
            f"{describe_bytes(budget.accelerator)}"
        )
    tiers = (budget.accelerator, budget.memory, budget.disk)
    if all(tiers) and total > sum(tiers):
        return (
            f"all their tensors take {describe_bytes(total)}, and the worker's accelerator, memory "
            f"and disk budgets hold {describe_bytes(sum(tiers))} together"
        )
    return ""


def list_slice_bytes(
    requirements: JobRequirements, *, with_scoring: bool = False
) -> list[SliceBytes]:
    """Return the bytes that a core's rank and an engine beside it need for their time slices.

    `with_scoring` adds those of the frozen models.
    """
    found = [estimate_slice_bytes(Role.TRAINING, True, requirements.ranks, requirements)]
    if requirements.needs_rollout:
        found.append(estimate_slice_bytes(Role.ROLLOUT, False, 1, requirements))
    if with_scoring:
        found.append(estimate_slice_bytes(Role.SCORING, False, 1, requirements))
    return found


def count_min_workers(requirements: JobRequirements, time_slicing: bool) -> int:
    """Return the minimum number of workers on which a job runs."""
    return max(
        requirements.min_workers,
        requirements.time_sliced_floor if time_slicing else requirements.worker_floor,
    )


def drop_infeasible_degrees(
    requirements: JobRequirements, workers: Sequence[WorkerRow]
) -> JobRequirements:
    """Return the requirements with only those degrees that an engine can have on these workers.

    A degree needs that many workers of one host, each with the bytes of its part. If no degree
    fits, return the requirements unchanged.
    """
    if len(requirements.tensor_parallel) == 1:
        return requirements
    worker_counts = Counter((worker.host, worker.budget) for worker in workers)
    degrees = tuple(
        d
        for d in requirements.tensor_parallel
        if _count_host_workers_with_room(requirements, worker_counts, d) >= d
    )
    if not degrees or degrees == requirements.tensor_parallel:
        return requirements
    return replace(
        requirements,
        tensor_parallel=degrees,
        can_time_slice=requirements.can_time_slice and degrees[0] == 1,
    )


def count_affordable_workers(
    requirements: JobRequirements,
    workers: Sequence[WorkerRow],
    settings: PoolSettings,
    workers_by_market: Mapping[str, int] | None = None,
) -> int:
    """Return the largest number of these workers within the job's limits of markets and cost.

    `workers_by_market` has their numbers, if these are known.
    """
    limits, counts, cost = requirements.markets, Counter[str](), 0.0
    if not limits.max_cost_per_hour:
        return limits.count_within(workers_by_market or count_markets(workers))
    for worker in sorted(workers, key=settings.get_price):
        if limits.count_within(counts + Counter([worker.market])) > counts.total():
            cost += settings.get_price(worker)
            if 0 < limits.max_cost_per_hour < cost:
                break
            counts[worker.market] += 1
    return counts.total()


def count_markets(workers: Iterable[WorkerRow]) -> Counter[str]:
    """Count workers by market."""
    return Counter(worker.market for worker in workers)


def limit_to_markets(
    requirements: JobRequirements,
    workers: Sequence[WorkerRow],
    settings: PoolSettings,
    workers_by_market: Mapping[str, int],
) -> JobRequirements:
    """Return the requirements with at most as many workers as the job's limits of markets allow."""
    if requirements.markets == MarketLimits():
        return requirements
    most = count_affordable_workers(requirements, workers, settings, workers_by_market)
    return replace(requirements, max_workers=min(requirements.max_workers or most, max(most, 1)))


def explain_market_limits(
    requirements: JobRequirements, workers: Sequence[WorkerRow], settings: PoolSettings
) -> str:
    """Return why the job's limits of markets and cost leave too few workers; empty if they do not.

    Without the limits the workers suffice.
    """
    if requirements.markets == MarketLimits():
        return ""
    least = count_min_workers(requirements, settings.time_slicing)
    most = count_affordable_workers(requirements, workers, settings)
    if most >= least:
        return ""
    limits = requirements.markets
    by_market = Counter(worker.market for worker in workers)
    mesh = ", ".join(f"{by_market[market]} {market}" for market in MARKETS if by_market[market])
    keys = ["pool.markets"] if set(by_market) - set(limits.accepted) else []
    keys += [f"pool.workers.most_{m}" for m in by_market if 0 < limits.get_most(m) < by_market[m]]
    keys += ["pool.max_cost_per_hour"] if limits.max_cost_per_hour else []
    return (
        f"after {' and '.join(keys)}, {most} of this mesh's {len(workers)} workers ({mesh}) "
        f"remain, and the job needs {least}: raise them, or join workers that they allow"
    )


def explain_infeasible(
    requirements: JobRequirements, workers: Sequence[WorkerRow], settings: PoolSettings
) -> str:
    """Return why a job can never run on these workers, and a fix; empty if it can."""
    requirements = drop_infeasible_degrees(requirements, workers)
    places = Counter(map(settings.get_gang_location, workers))
    return (
        explain_too_few_workers(requirements, places, settings)
        or explain_market_limits(requirements, workers, settings)
        or explain_no_common_location(requirements, workers, settings)
        or explain_too_little_memory(requirements, workers, settings)
        or explain_no_colocation(requirements, workers, settings)
    )


def explain_too_few_workers(
    requirements: JobRequirements, workers_by_location: Mapping[str, int], settings: PoolSettings
) -> str:
    """Return why the number of workers is too small, and a fix; empty if it is not.

    `workers_by_location` counts the workers of each location that can hold a gang.
    """
    turns = settings.time_slicing
    total, least = sum(workers_by_location.values()), count_min_workers(requirements, turns)
    if total < least:
        roles = {
            f"{requirements.ranks} for its core": True,
            f"{requirements.smallest_engine} to roll out": requirements.needs_rollout
            and not (turns and requirements.can_time_slice),
            "1 for its frozen models": requirements.needs_scoring
            and not (turns and requirements.can_share_scoring),
        }
        parts = ", ".join(role for role, is_needed in roles.items() if is_needed)
        reason = "pool.workers.least" if requirements.min_workers == least else parts
        return (
            f"the job needs {least} workers ({reason}), but this mesh has {total}: start a mesh "
            f"with `meshrl up --workers {least}`, or, if this one has lost workers, run `meshrl "
            "resume RUN`"
        )
    largest = max(workers_by_location.values(), default=0)
    if largest < requirements.ranks:
        kind = settings.gang_scope
        wider = (
            ', or set pool.gang_scope = "network" where hosts have one' if kind == "host" else ""
        )
        return (
            f"the job trains with ranks = {requirements.ranks}, but no {kind} of this mesh has "
            f"more than {largest} workers: set training.ranks to {largest} or less, or join a "
            f"larger {kind}{wider}"
        )
    if requirements.max_workers and requirements.max_workers < least:
        return (
            f"the job needs {least} workers, but pool.workers.most is {requirements.max_workers}: "
            f"raise it to {least}, or set 0 for no limit"
        )
    return ""


def explain_too_little_memory(
    requirements: JobRequirements, workers: Sequence[WorkerRow], settings: PoolSettings
) -> str:
    """Return why no accelerators have the bytes of a job's core or engine, and a fix.

    Empty if some have, and while the bytes of the job are unknown.
    """
    roles = [
        (
            "core",
            requirements.ranks,
            estimate_accelerator_bytes(Role.TRAINING, True, requirements.ranks, requirements),
        )
    ]
    worker_counts = Counter((worker.host, worker.budget) for worker in workers)
    if requirements.needs_rollout and not any(
        _count_host_workers_with_room(requirements, worker_counts, d) >= d
        for d in requirements.tensor_parallel
    ):
        count = requirements.tensor_parallel[
            -1
        ]  # the largest engine has the fewest bytes on each rank
        roles.append(
            ("engine", count, estimate_accelerator_bytes(Role.ROLLOUT, False, count, requirements))
        )
    for role, count, more in roles:
        fit = Counter(
            settings.get_gang_location(worker) if role == "core" else worker.host
            for worker in workers
            if has_room(worker.budget, Tier.ACCELERATOR, 0, more)
        )
        if max(fit.values(), default=0) >= count:
            continue
        largest = max((worker.budget.accelerator for worker in workers), default=0)
        return (
            f"the job's {role} needs at least {describe_bytes(more)} on each of {count} "
            f"accelerators of one {settings.gang_scope}. No {settings.gang_scope} has them, and "
            f"the largest accelerator has {describe_bytes(largest)}: join larger ones "
            f"(`--accelerator-bytes`), or change {MEMORY_KEYS[role]}"
        )
    return ""


def explain_no_colocation(
    requirements: JobRequirements, workers: Sequence[WorkerRow], settings: PoolSettings
) -> str:
    """Return why engines or frozen models cannot share the core's workers although they have to.

    Empty if they can, or need not: `pool.colocate` is not "always", and workers suffice.
    """
    always = requirements.colocate == "always" and requirements.needs_rollout
    if always and not requirements.can_time_slice:
        return (
            'pool.colocate = "always" needs engines that compute in time slices on one worker: set '
            "rollout.tensor_parallel to 1, or pool.colocate to auto"
        )
    if always and not settings.time_slicing:
        return (
            'pool.colocate = "always", but this mesh allows no time slices: set pool.colocate to '
            "auto, or pool.time_slicing in mesh.toml to true"
        )
    spare = len(workers) - requirements.ranks - int(requirements.needs_scoring)
    if not requirements.can_time_slice and requirements.needs_rollout:
        spare -= requirements.smallest_engine
    shares_engine = always or (
        requirements.needs_rollout
        and requirements.can_time_slice
        and spare < requirements.smallest_engine
    )
    reasons = [
        explain_no_residency(worker.budget, list_slice_bytes(requirements)) for worker in workers
    ]
    if shares_engine and reasons.count("") < requirements.ranks:
        return (
            "an engine and the core cannot share a worker by time slices: "
            f"{next(filter(None, reasons))}. Join workers for engines, or give them larger budgets"
        )
    shares_scoring = requirements.needs_scoring and spare < 0
    if not shares_scoring or not (why := explain_no_shared_scoring(requirements, workers)):
        return ""
    return (
        f"the frozen models cannot share a worker with the core by time slices: {why}. Join a "
        "worker for them, or one with larger budgets"
    )


def explain_no_shared_scoring(requirements: JobRequirements, workers: Sequence[WorkerRow]) -> str:
    """Return why frozen models fit on no worker beside core and engine; empty if they fit."""
    needs = list_slice_bytes(requirements, with_scoring=True)
    reasons = [explain_no_residency(worker.budget, needs) for worker in workers]
    return "" if "" in reasons else next(iter(reasons), "")


def drop_infeasible_sharing(
    requirements: JobRequirements, workers: Sequence[WorkerRow]
) -> JobRequirements:
    """Return the requirements of frozen models with a worker of their own, if they need one."""
    if not requirements.needs_scoring or not explain_no_shared_scoring(requirements, workers):
        return requirements
    return replace(requirements, can_share_scoring=False)


def explain_no_common_location(
    requirements: JobRequirements, workers: Sequence[WorkerRow], settings: PoolSettings
) -> str:
    """Return why a core and an engine of several workers do not fit beside each other.

    Each takes workers of one location. Empty if they fit.
    """
    if not requirements.needs_rollout or requirements.smallest_engine == 1:
        return ""
    hosts = Counter((settings.get_gang_location(worker), worker.host) for worker in workers)
    places = Counter(map(settings.get_gang_location, workers))
    for (place, _), count in hosts.items():
        remaining = places - Counter({place: requirements.smallest_engine})
        if (
            count >= requirements.smallest_engine
            and max(remaining.values(), default=0) >= requirements.ranks
        ):
            return ""
    sizes = ", ".join(str(count) for count in sorted(hosts.values(), reverse=True))
    return (
        f"the job's core needs {requirements.ranks} workers of one {settings.gang_scope} and an "
        f"engine {requirements.smallest_engine} of one host (rollout.tensor_parallel). The hosts "
        f"of this mesh, with {sizes}, cannot hold both: lower either, or join a larger host"
    )


def _count_host_workers_with_room(
    requirements: JobRequirements,
    workers_by_budget: Mapping[tuple[str, TierBytes], int],
    degree: int,
) -> int:
    """Return the largest number of workers of one host that have the bytes of an engine's part.

    `workers_by_budget` counts the workers of each host and budget; `degree` is the number of parts.
    """
    part = estimate_accelerator_bytes(Role.ROLLOUT, False, degree, requirements)
    fit: Counter[str] = Counter()
    for (host, budget), count in workers_by_budget.items():
        if has_room(budget, Tier.ACCELERATOR, 0, part):
            fit[host] += count
    return max(fit.values(), default=0)
