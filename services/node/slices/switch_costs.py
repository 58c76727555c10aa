"""Expected cost of a switch between the instances of a gang; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from meshrl.common.api.node import InstanceResidency, ResidencyState
from meshrl.common.state.pool.workers.rows import Tier

# Bytes per second of a direction without a measurement: between a copy in the memory of a small CPU
# host (about 1e9) and one over PCIe 4.0 with 16 lanes (about 2.5e10).
PRIOR_RATE = 4e9
PRIOR_DISK_SHARE = 0.2  # of the rate of memory, until the disk is measured


def estimate_copy_s(
    rates: Mapping[str, float], size_bytes: int, source: Tier, target: Tier
) -> float:
    """Return the expected seconds of a copy; `rates` are those of `ResidencyState`."""
    way = f"{source}>{target}"
    rate = rates.get(way, 0.0)
    if not rate:
        rate = rates.get(way.replace(Tier.DISK, Tier.MEMORY), 0.0) or PRIOR_RATE
        if Tier.DISK in (source, target):
            rate *= PRIOR_DISK_SHARE
    return size_bytes / rate


def is_fully_resident(state: ResidencyState) -> bool:
    """Return True if all kinds of all of a worker's instances are on its accelerator, beside room
    to compute.
    """
    return state.fits_together and all(
        instance.accelerator_bytes.get(kind, 0) >= size_bytes
        for instance in state.instances
        for kind, size_bytes in instance.size_bytes.items()
    )


def estimate_switch_s(
    instance: str, kinds: Collection[str], workers: Iterable[ResidencyState]
) -> float:
    """Return the expected seconds until kinds of an instance are on the accelerators of workers.

    The workers move tensors at the same time, so the slowest counts. `kinds` empty: all of the
    instance.
    """
    return max((_estimate_on_worker(instance, kinds, state) for state in workers), default=0.0)


def _estimate_on_worker(instance: str, kinds: Collection[str], state: ResidencyState) -> float:
    """Return the seconds to load what is missing, and to offload what has no copy and must leave.

    What a prefetch has loaded is not missing. Kinds with an equal copy leave first, at no cost. The
    others leave to memory as far as it has room, and then to disk.
    """
    own = next((one for one in state.instances if one.instance == instance), None)
    if own is None:
        return 0.0
    missing = {
        kind: max(0, size_bytes - own.accelerator_bytes.get(kind, 0))
        for kind, size_bytes in own.size_bytes.items()
        if not kinds or kind in kinds
    }
    missing_bytes = sum(missing.values())
    if not missing_bytes:
        return 0.0
    copies = [
        (size, _find_copy_tier(own, kind), Tier.ACCELERATOR) for kind, size in missing.items()
    ]
    if state.accelerator_budget:
        used_bytes = sum(sum(one.accelerator_bytes.values()) for one in state.instances)
        others = [one for one in state.instances if one is not own]
        clean_bytes = sum(map(_count_clean_bytes, others))
        leaving_bytes = max(0, used_bytes + missing_bytes - state.accelerator_budget - clean_bytes)
        disk_bytes = 0  # for which memory has no room beside and in place of outdated copies
        if state.memory_room >= 0:
            outdated = (one.memory_bytes.get(kind, 0) for one in others for kind in one.dirty_kinds)
            disk_bytes = max(0, leaving_bytes - state.memory_room - sum(outdated))
        copies.append((leaving_bytes - disk_bytes, Tier.ACCELERATOR, Tier.MEMORY))
        copies.append((disk_bytes, Tier.ACCELERATOR, Tier.DISK))
    return sum(estimate_copy_s(state.rates, *copy) for copy in copies)


def _find_copy_tier(instance: InstanceResidency, kind: str) -> Tier:
    """Return the tier that a kind is loaded from; one without a copy costs as much as memory's."""
    is_cold = instance.disk_bytes.get(kind) and not instance.memory_bytes.get(kind)
    return Tier.DISK if is_cold else Tier.MEMORY


def _count_clean_bytes(instance: InstanceResidency) -> int:
    """Return the bytes on the accelerator that have an equal copy elsewhere."""
    return sum(
        size_bytes
        for kind, size_bytes in instance.accelerator_bytes.items()
        if kind not in instance.dirty_kinds
    )
