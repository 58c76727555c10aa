"""The workers that an engine of several is formed of: of one host, and of those where the fewest
residents have to leave for it.

What comes together are whole gangs: a worker joins another gang only when all have left its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from meshrl.common.state.pool.demand.needs import Need
from meshrl.common.state.pool.placing.fitting import room, takes
from meshrl.common.state.pool.store.documents import numbered
from meshrl.common.state.pool.workers.rows import Role, Tier
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.team import Seated

NEVER = 100  # the cost of a resident that does not leave for an engine

Cost = Callable[[Seated], int]  # how much a resident's work would be missed


@dataclass(frozen=True, slots=True)
class GatheredWorkers:
    """Workers of one host, in rank order, and who leaves for them."""

    workers: tuple[str, ...]
    leave: tuple[Seated, ...] = ()
    cost: int = 0  # 0: nobody has to leave


def idle(draft: Draft, need: Need, degree: int) -> dict[str, list[str]]:
    """By host, the workers that an engine of this degree can be formed of without anybody leaving;
    hosts and workers in their order.
    """
    found: dict[str, list[str]] = {}
    for worker in draft.idle:
        alone = not draft.on[worker] and not draft.beside(worker)
        if alone and holds(draft, need, worker, degree):
            found.setdefault(draft.workers[worker].host, []).append(worker)
    return found


def gather(draft: Draft, need: Need, degree: int, cost: Cost) -> GatheredWorkers | None:
    """The workers for an engine of this degree, where residents leave by what they cost; None when
    no host has so many.
    """
    hosts: dict[str, list[GatheredWorkers]] = {}
    for unit in _units(draft, need, degree, cost):
        hosts.setdefault(draft.workers[unit.workers[0]].host, []).append(unit)
    chosen = {host: units for host in hosts if (units := _cheapest(hosts[host], degree))}
    if not chosen:
        return None

    def price(host: str) -> tuple[int, int, tuple[int, str]]:
        """What it costs, and how many workers lose their gang for it."""
        units = chosen[host]
        lose = sum(len(unit.workers) for unit in units if unit.cost)
        return sum(unit.cost for unit in units), lose, numbered(host)

    units = chosen[min(chosen, key=price)]
    workers = [worker for unit in units for worker in unit.workers][:degree]
    leave = tuple(seated for unit in units for seated in unit.leave)
    return GatheredWorkers(tuple(sorted(workers, key=numbered)), leave)


def holds(draft: Draft, need: Need, worker: str, degree: int) -> bool:
    """Whether a worker's accelerator has the bytes of a part of such an engine."""
    part = takes(Role.ROLLOUT, False, degree, need)
    return room(draft.workers[worker].budget, Tier.ACCELERATOR, 0, part)


def helps(draft: Draft, need: Need, worker: str) -> bool:
    """Whether a worker's accelerator has the bytes of a helper."""
    whole = takes(Role.TRAINING, False, 1, need)
    return room(draft.workers[worker].budget, Tier.ACCELERATOR, 0, whole)


def _units(draft: Draft, need: Need, degree: int, cost: Cost) -> Iterable[GatheredWorkers]:
    """All that is to be had, each gang as one."""
    seen: set[str] = set()
    for worker in sorted(draft.placeable, key=numbered):
        gang = draft.gangs.get(draft.where.get(worker, ""))
        if gang is None or not gang.residents:
            if holds(draft, need, worker, degree):
                yield GatheredWorkers((worker,))
        elif gang.id not in seen:
            seen.add(gang.id)
            leave = tuple(draft.of[r.job][r.id] for r in gang.residents)
            price = sum(map(cost, leave))
            workers = [w for w in gang.workers if w in draft.placeable]
            fit = tuple(w for w in workers if holds(draft, need, w, degree))
            one_host = len({draft.workers[w].host for w in fit}) == 1
            if price < NEVER and one_host:
                yield GatheredWorkers(fit, leave, price)


def _cheapest(units: Sequence[GatheredWorkers], degree: int) -> list[GatheredWorkers]:
    """Idle workers first; then the one gang that has enough, or the largest until there are enough;
    empty when there are not.
    """
    if sum(len(unit.workers) for unit in units) < degree:
        return []
    chosen = [unit for unit in units if not unit.cost][:degree]
    others = [unit for unit in units if unit.cost]
    while (lacking := degree - sum(len(unit.workers) for unit in chosen)) > 0:
        enough = [unit for unit in others if len(unit.workers) >= lacking]
        best = (
            min(enough, key=lambda u: (u.cost, len(u.workers), numbered(u.workers[0])))
            if enough
            else min(others, key=lambda u: (u.cost, -len(u.workers), numbered(u.workers[0])))
        )
        others.remove(best)
        chosen.append(best)
    spare = sum(len(unit.workers) for unit in chosen) - degree
    for unit in [unit for unit in chosen if not unit.cost][:spare]:  # the gangs have enough already
        chosen.remove(unit)
    return chosen
