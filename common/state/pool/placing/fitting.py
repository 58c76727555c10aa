"""Whether a job could ever run on these workers, if it had them all to itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshrl.common.state.pool.demand.needs import Need
from meshrl.common.state.pool.workers.rows import Budget, Resident, Role, Tier, WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings


def takes(role: Role, core: bool, ranks: int, need: Need) -> int:
    """Bytes of each worker's accelerator that such a resident takes at least; 0 where it is not
    known. Beside the parameters a helper has gradients of what is trained, a core moments, too.
    An engine of several ranks has a part of the parameters on each. How much of a mixture is
    experts, and so on which ranks of a core that has them apart, is not known.
    """
    if role == Role.ROLLOUT:
        return (need.bytes // 2 if need.half else need.bytes) // ranks
    if role != Role.TRAINING:
        return 0
    if core and need.attention:
        return 0
    trained = 0 if need.adapters else need.bytes
    return (need.bytes + trained * (1 + need.moments)) // ranks if core else need.bytes + trained


def sleeps(resident: Resident, need: Need) -> int:
    """Bytes of each worker's memory or disk that a core takes asleep: it keeps no gradients. Ranks
    with experts alone are taken to have nearly all.
    """
    if not resident.core:
        return 0
    trained = 0 if need.adapters else need.bytes
    return (need.bytes + trained * need.moments) // (len(resident.ranks) - need.attention)


def room(budget: Budget, tier: Tier, taken: int, more: int) -> bool:
    """Whether a worker has `more` bytes of that tier, when so many are taken."""
    if tier == Tier.ABSENT:
        return True
    limit = {
        Tier.ACCELERATOR: budget.accelerator,
        Tier.MEMORY: budget.memory,
        Tier.DISK: budget.disk,
    }[tier]
    return not limit or taken + more <= limit


def tight_floor(need: Need) -> int:
    """Workers that a job takes at least where engines and cores compute by turns."""
    return need.ranks + int(need.scoring) if need.alternates else need.floor


def least_workers(need: Need, turns: bool) -> int:
    """Workers without which a job does not run."""
    return max(need.least, tight_floor(need) if turns else need.floor)


def fitted(need: Need, workers: Sequence[WorkerRow]) -> Need:
    """The need with those degrees alone that an engine of the job can have on these workers: so
    many of one host, each with the bytes of its part. With all degrees where it can have none.
    """
    if len(need.degrees) == 1:
        return need
    alike = Counter((worker.host, worker.budget) for worker in workers)
    degrees = tuple(d for d in need.degrees if _most_of_a_host(need, alike, d) >= d)
    if not degrees or degrees == need.degrees:
        return need
    return replace(need, degrees=degrees, alternates=need.alternates and degrees[0] == 1)


def never_fits(need: Need, workers: Sequence[WorkerRow], settings: PoolSettings) -> str:
    """Why a job can never run on these workers, and what to do; empty when it can."""
    need = fitted(need, workers)
    places = Counter(map(settings.place, workers))
    return (
        never_fits_on(need, places, settings)
        or too_far_apart(need, workers, settings)
        or too_large(need, workers, settings)
    )


def never_fits_on(need: Need, places: Mapping[str, int], settings: PoolSettings) -> str:
    """The same but for its bytes, where the workers of each place of gangs are counted."""
    turns = settings.turns
    total, least = sum(places.values()), least_workers(need, turns)
    if total < least:
        roles = {
            f"{need.ranks} for its core": True,
            f"{need.smallest} to roll out": need.rolls_out and not (turns and need.alternates),
            "1 for its frozen models": need.scoring,
        }
        parts = ", ".join(role for role, wanted in roles.items() if wanted)
        asked = "pool.workers.least" if need.least == least else parts
        return (
            f"the job needs {least} workers ({asked}), and this mesh has {total}: start one with "
            f"`meshrl up --workers {least}`, or, when workers of this one were lost, go on with "
            "`meshrl resume RUN`"
        )
    largest = max(places.values(), default=0)
    if largest < need.ranks:
        kind = settings.gangs
        wider = ', or set pool.gangs = "network" where hosts have one' if kind == "host" else ""
        return (
            f"the job trains with ranks = {need.ranks}, and no {kind} of this mesh has more than "
            f"{largest} workers: set training.ranks to {largest} or less, or join a larger {kind}"
            f"{wider}"
        )
    if need.most and need.most < least:
        return (
            f"the job needs {least} workers, and pool.workers.most is {need.most}: raise it to "
            f"{least}, or set 0 for as many as there are"
        )
    return ""


def too_large(need: Need, workers: Sequence[WorkerRow], settings: PoolSettings) -> str:
    """Why no accelerators of these workers have the bytes of a job's core, or of its engine, and
    what to do; empty when some have, and while its bytes are not known.
    """
    roles = [("core", need.ranks, takes(Role.TRAINING, True, need.ranks, need))]
    alike = Counter((worker.host, worker.budget) for worker in workers)
    if need.rolls_out and not any(_most_of_a_host(need, alike, d) >= d for d in need.degrees):
        count = need.degrees[-1]  # the largest engine has the least on each
        roles.append(("engine", count, takes(Role.ROLLOUT, False, count, need)))
    for role, count, more in roles:
        fit = Counter(
            settings.place(worker) if role == "core" else worker.host
            for worker in workers
            if room(worker.budget, Tier.ACCELERATOR, 0, more)
        )
        if max(fit.values(), default=0) >= count:
            continue
        largest = max((worker.budget.accelerator for worker in workers), default=0)
        more_ranks = {"core": "training.ranks", "engine": "rollout.tensor_parallel"}
        spread = f", or raise {more_ranks[role]}"
        return (
            f"the job's {role} takes {more} bytes of each of {count} accelerators of one "
            f"{settings.gangs} (its model has {need.bytes} in float32), no {settings.gangs} has "
            f"them, and the largest has {largest}: "
            f"join larger ones (`--accelerator-bytes`), or train a smaller model{spread}"
        )
    return ""


def too_far_apart(need: Need, workers: Sequence[WorkerRow], settings: PoolSettings) -> str:
    """Why a core and an engine of several workers do not find room beside each other: each takes
    workers of one place; empty when they do.
    """
    if not need.rolls_out or need.smallest == 1:
        return ""
    hosts = Counter((settings.place(worker), worker.host) for worker in workers)
    places = Counter(map(settings.place, workers))
    for (place, _), count in hosts.items():
        left = places - Counter({place: need.smallest})
        if count >= need.smallest and max(left.values(), default=0) >= need.ranks:
            return ""
    sizes = ", ".join(str(count) for count in sorted(hosts.values(), reverse=True))
    return (
        f"the job's core takes {need.ranks} workers of one {settings.gangs} and an engine "
        f"{need.smallest} of one host (rollout.tensor_parallel), and the hosts of this mesh, with "
        f"{sizes}, have no room for both: lower either, or join a larger host"
    )


def _most_of_a_host(need: Need, alike: Mapping[tuple[str, Budget], int], degree: int) -> int:
    """The most workers of one host that have a part's bytes of an engine of so many, of so many
    workers of each host and budget.
    """
    part = takes(Role.ROLLOUT, False, degree, need)
    fit: Counter[str] = Counter()
    for (host, budget), count in alike.items():
        if room(budget, Tier.ACCELERATOR, 0, part):
            fit[host] += count
    return max(fit.values(), default=0)
