"""Gathering of workers for an engine of several: on the host where removals cost least.

Whole gangs are gathered: a worker joins another gang only when all instances have left its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.feasibility import estimate_accelerator_bytes, has_room
from meshrl.common.state.pool.store.documents import id_sort_key
from meshrl.common.state.pool.workers.rows import Role, Tier
from meshrl.services.planner.policies.market_limits import explain_not_taken, rank_for_engine
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.job_instances import InstancePlacement

IMMOVABLE_COST = 100  # cost of an instance that never leaves for an engine

RemovalCost = Callable[[InstancePlacement], int]  # cost of stopping an instance's work


@dataclass(frozen=True, slots=True)
class GatheredWorkers:
    """Workers of one host, in rank order, and the placements evicted for them."""

    workers: tuple[str, ...]
    evicted: tuple[InstancePlacement, ...] = ()
    cost: int = 0  # 0: no instance has to leave


def find_idle_workers(draft: PoolDraft, job: PlannedJob, degree: int) -> dict[str, list[str]]:
    """Find the workers of each host that can form an engine of this degree without an eviction, in
    order.
    """
    found: dict[str, list[str]] = {}
    for worker in draft.idle_workers:
        alone = not draft.placements_by_worker[worker] and not draft.list_gang_neighbours(worker)
        if alone and can_host_engine(draft, job, worker, degree):
            found.setdefault(draft.workers[worker].host, []).append(worker)
    return dict(sorted(found.items(), key=lambda item: rank_for_engine(draft, item[1][0])))


def gather_workers(
    draft: PoolDraft, job: PlannedJob, degree: int, cost: RemovalCost
) -> GatheredWorkers | None:
    """Gather workers for an engine of this degree at the lowest cost; None if no host has
    enough.
    """
    hosts: dict[str, list[GatheredWorkers]] = {}
    for unit in _list_units(draft, job, degree, cost):
        hosts.setdefault(draft.workers[unit.workers[0]].host, []).append(unit)
    chosen = {
        host: units for host in hosts if (units := _choose_cheapest_units(hosts[host], degree))
    }
    chosen = {
        host: units
        for host, units in chosen.items()
        if not explain_not_taken(draft, job, [w for unit in units for w in unit.workers][:degree])
    }
    if not chosen:
        return None

    def price(host: str) -> tuple[int, int, int, tuple[int, str]]:
        """Return the cost of a host, and the number of workers that lose their gang."""
        units = chosen[host]
        lose = sum(len(unit.workers) for unit in units if unit.cost)
        rank = rank_for_engine(draft, units[0].workers[0])
        return sum(unit.cost for unit in units), lose, rank, id_sort_key(host)

    units = chosen[min(chosen, key=price)]
    workers = [worker for unit in units for worker in unit.workers][:degree]
    leave = tuple(seated for unit in units for seated in unit.evicted)
    return GatheredWorkers(tuple(sorted(workers, key=id_sort_key)), leave)


def can_host_engine(draft: PoolDraft, job: PlannedJob, worker: str, degree: int) -> bool:
    """Return True if the job takes such a worker, and its accelerator has memory for a shard of
    such an engine.
    """
    part = estimate_accelerator_bytes(Role.ROLLOUT, False, degree, job.requirements)
    has_memory = has_room(draft.workers[worker].budget, Tier.ACCELERATOR, 0, part)
    return has_memory and not explain_not_taken(draft, job, [worker])


def can_host_hybrid(draft: PoolDraft, job: PlannedJob, worker: str) -> bool:
    """Return True if the job takes a worker, and its accelerator has memory for a hybrid."""
    training_bytes = estimate_accelerator_bytes(Role.TRAINING, False, 1, job.requirements)
    has_memory = has_room(draft.workers[worker].budget, Tier.ACCELERATOR, 0, training_bytes)
    return has_memory and not explain_not_taken(draft, job, [worker])


def _list_units(
    draft: PoolDraft, job: PlannedJob, degree: int, cost: RemovalCost
) -> Iterable[GatheredWorkers]:
    """Yield the available units: single workers and whole gangs."""
    visited_gangs: set[str] = set()
    for worker in sorted(draft.placeable_workers, key=id_sort_key):
        gang = draft.gangs.get(draft.gang_by_worker.get(worker, ""))
        if gang is None or not gang.instances:
            if can_host_engine(draft, job, worker, degree):
                yield GatheredWorkers((worker,))
        elif gang.id not in visited_gangs:
            visited_gangs.add(gang.id)
            leave = tuple(draft.placements_by_job[r.job][r.id] for r in gang.instances)
            price = sum(map(cost, leave))
            workers = [w for w in gang.workers if w in draft.placeable_workers]
            fit = tuple(w for w in workers if can_host_engine(draft, job, w, degree))
            one_host = len({draft.workers[w].host for w in fit}) == 1
            if price < IMMOVABLE_COST and one_host:
                yield GatheredWorkers(fit, leave, price)


def _choose_cheapest_units(units: Sequence[GatheredWorkers], degree: int) -> list[GatheredWorkers]:
    """Choose idle workers first, then the one gang that suffices, or the largest gangs. Return an
    empty list if there are not enough.
    """
    if sum(len(unit.workers) for unit in units) < degree:
        return []
    chosen = [unit for unit in units if not unit.cost][:degree]
    others = [unit for unit in units if unit.cost]
    while (lacking := degree - sum(len(unit.workers) for unit in chosen)) > 0:
        enough = [unit for unit in others if len(unit.workers) >= lacking]
        best = (
            min(enough, key=lambda u: (u.cost, len(u.workers), id_sort_key(u.workers[0])))
            if enough
            else min(others, key=lambda u: (u.cost, -len(u.workers), id_sort_key(u.workers[0])))
        )
        others.remove(best)
        chosen.append(best)
    spare = sum(len(unit.workers) for unit in chosen) - degree
    for unit in [unit for unit in chosen if not unit.cost][:spare]:  # the gangs suffice
        chosen.remove(unit)
    return chosen
