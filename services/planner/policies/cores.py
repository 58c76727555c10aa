"""The core of a job: who becomes it, and how its workers come together on as few hosts as can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from meshrl.common.hardware.profiles import declared, kind_of
from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import Why
from meshrl.common.state.pool.placing.fitting import room, takes
from meshrl.common.state.pool.store.documents import numbered
from meshrl.common.state.pool.workers.rows import Role, Tier
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.team import Seated, Team

NEVER = 100  # the cost of a worker that is not to be had
DEAR = NEVER // 2  # of one whose gang has steps that are in no checkpoint
IDLE = 2  # above that of one on which nobody is awake
LIMITS = DEAR, NEVER  # costs below which workers are looked for, one after the other

Offer = tuple[int, tuple[int, str]]  # the cost of a worker, and its id as it is ordered


def place_core(draft: Draft, job: PlannedJob, share: int, home: str) -> None:
    """A job without a core gets one: on workers of helpers, which have the model already, or of
    those whose work is missed least.
    """
    if draft.team(job.id).core is not None:
        return
    workers = _gather(draft, job, home)
    if not workers:
        return
    snapshot = draft.snapshot
    had = any(r.job == job.id for gang in snapshot.gangs for r in gang.residents)
    rule = "repair" if had or job.steps_done else "default"
    why = Why(rule, job.id, {"entitled": share})
    # Who sleeps on one worker stays; a gang whose workers become another one is left by all.
    leave = {s.resident.id: s for worker in workers for s in draft.on[worker].values()}
    if len(workers) == 1:
        leave = {name: seated for name, seated in leave.items() if seated.awake}
    elif len({draft.where.get(worker, "") for worker in workers}) > 1:
        leave |= {s.resident.id: s for worker in workers for s in draft.beside(worker)}
    for seated in leave.values():
        draft.remove(seated, why)
    draft.seat(workers, job.id, Role.TRAINING, why, core=True, apart=job.need.apart)


def _gather(draft: Draft, job: PlannedJob, home: str) -> list[str]:
    """The workers of a new core, in rank order; none while they are not to be had."""
    ranks = job.need.ranks
    own = draft.team(job.id)
    if ranks > 1:
        near = [w for w in draft.placeable if draft.place(w) == home]
        wanted = [w for w in near if kind_of(draft.workers[w].accelerator) in job.need.kinds]
        near = wanted if len(wanted) >= ranks else near  # of the kinds that ranks are set apart for
    else:
        mine = [w for seated in own.all for w in seated.workers if w in draft.placeable]
        near = [*mine, *filter(None, [draft.free(lambda w: _fits(draft, job, w))])]
        if any(need.smallest > 1 for need in draft.needs.values()):  # where an engine keeps room
            at_home = draft.free(lambda w: draft.place(w) == home and _fits(draft, job, w))
            there = [worker for worker in mine if draft.place(worker) == home]
            near = [*there, *filter(None, [at_home])] or near
    offers: dict[str, list[Offer]] = {}
    for worker in set(near):
        host = draft.workers[worker].host if ranks > 1 else ""
        offers.setdefault(host, []).append((_cost(draft, job, own, worker), numbered(worker)))
    if job.need.attention:
        known = declared()
        kinds = {worker: kind_of(draft.workers[worker].accelerator) for worker in near}
        speeds = {w: known[kind].flops if kind in known else 0.0 for w, kind in kinds.items()}
        looks = (two_kinds(offers, speeds, job.need.attention, ranks, m) for m in (IDLE, *LIMITS))
    else:
        looks = (fewest_hosts(offers, ranks, most) for most in LIMITS)
    return next(filter(None, looks), [])


def two_kinds(
    offers: Mapping[str, Sequence[Offer]],
    speeds: Mapping[str, float],
    attention: int,
    ranks: int,
    most: int,
) -> list[str]:
    """Workers as `fewest_hosts` chooses them: the first `attention` of `ranks` with the fastest
    accelerators of which there are so many, the others with the slowest; where all are of one kind,
    or there are not enough of two, of any, the fastest first.
    """

    def of(speed: float) -> dict[str, list[Offer]]:
        return {
            host: [offer for offer in some if speeds[offer[1][1]] == speed]
            for host, some in offers.items()
        }

    rising = sorted(set(speeds.values()))
    for fast, slow in product(reversed(rising), rising):
        if fast <= slow:
            continue
        first = fewest_hosts(of(fast), attention, most)
        rest = fewest_hosts(of(slow), ranks - attention, most)
        if first and rest:
            return first + rest
    chosen = fewest_hosts(offers, ranks, most)
    return sorted(chosen, key=lambda worker: -speeds[worker])


def fewest_hosts(offers: Mapping[str, Sequence[Offer]], ranks: int, most: int) -> list[str]:
    """So many workers that cost less than `most`, of as few hosts as can be and of the cheapest of
    those, in rank order: those of a host are next to each other. Empty when there are not so many.
    """
    fit = {host: sorted(one for one in some if one[0] < most) for host, some in offers.items()}
    left = {host: some for host, some in fit.items() if some}
    if sum(map(len, left.values())) < ranks:
        return []
    chosen: list[list[tuple[int, str]]] = []

    def order(host: str) -> tuple[int, int, Offer]:
        some, cost = left[host], sum(cost for cost, _ in left[host][:ranks])
        return (cost, len(some), some[0]) if whole else (-len(some), cost, some[0])

    while ranks:  # the largest first, until one has all that are still wanted
        whole = [host for host, some in left.items() if len(some) >= ranks]
        host = min(whole or left, key=order)
        taken = left.pop(host)[:ranks]
        chosen.append(sorted(name for _, name in taken))
        ranks -= len(taken)
    return [worker for names in sorted(chosen) for _, worker in names]


def _cost(draft: Draft, job: PlannedJob, own: Team, worker: str) -> int:
    """How much the work that a worker does is missed."""
    if not _fits(draft, job, worker):
        return NEVER
    there = list(draft.on[worker].values())
    cost = max((_missed(job, own, seated) for seated in there if seated.awake), default=1)
    if job.need.ranks > 1:  # its gang may have to end for this
        beside = draft.beside(worker)
        there += beside
        for seated in beside:
            if seated.awake:  # a core that has a checkpoint goes on in another gang
                last = seated.resident.core or seated.resident.turns
                dear = last and _absent(draft, seated)
                cost = max(cost, DEAR if dear else _missed(job, own, seated))
    asleep = [s for s in there if not s.awake]
    if any(not s.resident.settled for s in asleep):
        return NEVER
    if asleep and job.need.ranks > 1:
        return NEVER if any(not _absent(draft, s) for s in asleep) else max(cost, 8)
    return cost + 2 * bool(asleep)


def _fits(draft: Draft, job: PlannedJob, worker: str) -> bool:
    need = takes(Role.TRAINING, True, job.need.ranks, job.need)
    return room(draft.workers[worker].budget, Tier.ACCELERATOR, 0, need)


def _missed(job: PlannedJob, own: Team, seated: Seated) -> int:
    resident = seated.resident
    if resident.core:
        return NEVER
    if resident.job != job.id:  # its job gets another worker for it
        return NEVER if job.need.ranks == 1 or resident.turns else 6
    order = {Role.TRAINING: 0, Role.SCORING: 3}
    return order.get(resident.role, 2 if len(own.engines) > 1 else 4)


def _absent(draft: Draft, seated: Seated) -> bool:
    """Whether a resident may leave: a checkpoint has all of it."""
    job = next((j for j in draft.snapshot.jobs if j.id == seated.resident.job), None)
    return job is None or job.checkpointed
