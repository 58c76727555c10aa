"""The bytes that residents take of a worker, and whether it has them."""

from __future__ import annotations

from common.state.pool.demand.needs import Need
from common.state.pool.workers.rows import Budget, Resident, Role, Tier


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
