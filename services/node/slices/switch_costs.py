"""Expected cost of a switch between the instances of a gang; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from meshrl.common.api.node import InstanceResidency, ResidencyState
from meshrl.common.state.pool.workers.rows import Tier

LOAD = f"{Tier.MEMORY}>{Tier.ACCELERATOR}"  # directions, as in ResidencyState.rates
OFFLOAD = f"{Tier.ACCELERATOR}>{Tier.MEMORY}"
# Bytes per second of a direction without a measurement: between a copy in the memory of a small CPU
# host (about 1e9) and one over PCIe 4.0 with 16 lanes (about 2.5e10).
PRIOR_RATE = 4e9


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

    What a prefetch has loaded is not missing. Kinds with an equal copy leave first, at no cost.
    """
    own = next((one for one in state.instances if one.instance == instance), None)
    if own is None:
        return 0.0
    missing_bytes = sum(
        max(0, size_bytes - own.accelerator_bytes.get(kind, 0))
        for kind, size_bytes in own.size_bytes.items()
        if not kinds or kind in kinds
    )
    if not missing_bytes:
        return 0.0
    leaving_bytes = 0
    if state.accelerator_budget:
        used_bytes = sum(sum(one.accelerator_bytes.values()) for one in state.instances)
        clean_bytes = sum(_count_clean_bytes(one) for one in state.instances if one is not own)
        leaving_bytes = max(0, used_bytes + missing_bytes - state.accelerator_budget - clean_bytes)
    load_rate = state.rates.get(LOAD, 0.0) or PRIOR_RATE
    offload_rate = state.rates.get(OFFLOAD, 0.0) or PRIOR_RATE
    return missing_bytes / load_rate + leaving_bytes / offload_rate


def _count_clean_bytes(instance: InstanceResidency) -> int:
    """Return the bytes on the accelerator that have an equal copy elsewhere."""
    return sum(
        size_bytes
        for kind, size_bytes in instance.accelerator_bytes.items()
        if kind not in instance.dirty_kinds
    )
