"""Accelerator of a worker: budget, room and residency of the instances on it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from meshrl.common.api.node import InstanceResidency, KindUse, ResidencyState
from meshrl.common.state.pool.scheduling.feasibility import SliceBytes
from meshrl.common.state.pool.workers.rows import TensorKind, Tier, TierBytes
from meshrl.services.node.instances.budgets import Budgets
from meshrl.services.node.instances.gpu_memory import GpuMemoryGuard
from meshrl.services.node.residency.kind_moves import MoveRates
from meshrl.services.node.residency.kind_table import KindTable
from meshrl.services.node.residency.residency_plan import ResidencySnapshot


class AcceleratorState:
    """State of the accelerator, from which moves are planned."""

    def __init__(
        self, budgets: Budgets, gpu_memory: GpuMemoryGuard, table: KindTable, rates: MoveRates
    ) -> None:
        self._budgets, self._gpu_memory = budgets, gpu_memory
        self._table, self._rates = table, rates
        self.device_bytes = 0  # of the GPU's memory; 0: unknown
        self.needed: dict[str, SliceBytes] = {}  # by instance

    @property
    def budget(self) -> int:
        """Bytes for the tensors of all instances; 0: unlimited.

        On a GPU it is at most the memory less the context of each process.
        """
        declared = self._budgets.limits.accelerator
        if not self.device_bytes:
            return declared
        contexts = max(1, len(self._table.processes)) * self._gpu_memory.context_bytes
        free_bytes = max(1, self.device_bytes - contexts)
        return min(declared, free_bytes) if declared else free_bytes

    @property
    def free_bytes(self) -> float:
        """Free bytes now; slices that compute may need some of them."""
        return self.make_snapshot().free_bytes(Tier.ACCELERATOR)

    def has_room(self, size_bytes: int) -> bool:
        """Return True if so many bytes are free."""
        return self.free_bytes >= size_bytes

    def describe(self, is_pending: Callable[[str], bool]) -> ResidencyState:
        """Return the residency of all instances.

        `is_pending` returns True for the name of a process that waits for room to start.
        """
        if not self.budget:
            return ResidencyState(0, [], {})
        instances = [
            InstanceResidency(
                entry.instance,
                entry.generation,
                {kind: place.accelerator_bytes for kind, place in entry.places.items()},
                {kind: place.size_bytes for kind, place in entry.places.items()},
                [kind for kind, place in entry.places.items() if place.is_dirty],
                {kind: place.memory_bytes for kind, place in entry.places.items()},
                {kind: place.disk_bytes for kind, place in entry.places.items()},
            )
            for entry in self._table.entries
        ]
        known = {one.instance for one in instances}
        for process in self._table.processes:
            instance, generation = process.process_key
            if instance not in known and (process.is_ready or is_pending(process.name)):
                used_bytes = self._budgets.get_usage(process.name).accelerator
                size_bytes = {str(TensorKind.PARAMETERS): max(1, used_bytes)}
                instances.append(InstanceResidency(instance, generation, {}, size_bytes, []))
        uses = [KindUse(instance, []) for instance in known]
        working_bytes = max(map(self.compute_working_bytes, uses), default=0)
        snapshot = self.make_snapshot()
        fits_together = snapshot.free_bytes(Tier.ACCELERATOR) >= working_bytes
        memory = snapshot.free_bytes(Tier.MEMORY)
        memory_room = -1 if math.isinf(memory) else max(0, int(memory))
        rates = self._rates.by_direction
        return ResidencyState(self.budget, instances, rates, fits_together, memory_room)

    def make_snapshot(
        self,
        computing: Sequence[KindUse] = (),
        expected: Sequence[KindUse] = (),
        *,
        staying: Collection[str] = (),
        full_tiers: Collection[str] = (),
        requester: KindUse | None = None,
    ) -> ResidencySnapshot:
        """Return the state to plan from.

        `computing` instances and the `requester` need room beside their kinds.
        """
        budgets, other_bytes = self._budgets.limits, self._table.sum_other_bytes()
        working: defaultdict[str, int] = defaultdict(int)  # by instance
        for use in (*computing, *([requester] if requester is not None else [])):
            working_bytes = self.compute_working_bytes(use)
            working[use.instance] = max(working[use.instance], working_bytes)
        used_bytes = other_bytes.accelerator + sum(working.values())
        # The claim of one that starts or wakes keeps its room, also if its kinds leave.
        moving = {
            one.process_key[0]
            for one in self._table.processes
            if one.is_moving or self._budgets.has_reservation(one.name)
        }
        fully_used = {use.instance for use in computing if not use.kinds}
        return ResidencySnapshot(
            self._table.places,
            TierBytes(self.budget, budgets.memory, budgets.disk),
            replace(other_bytes, accelerator=used_bytes),
            frozenset({*staying, *moving, *fully_used}),
            frozenset((use.instance, kind) for use in computing for kind in use.kinds),
            expected,
            self._rates.by_direction,
            frozenset(full_tiers),
        )

    def compute_further_bytes(
        self, computing: Sequence[KindUse], expected: Sequence[KindUse]
    ) -> int:
        """Return the bytes by which an expected slice needs more to compute than present ones."""
        present_bytes = max(map(self.compute_working_bytes, computing), default=0)
        next_bytes = max(map(self.compute_working_bytes, expected), default=0)
        return max(0, next_bytes - present_bytes)

    def compute_working_bytes(self, use: KindUse) -> int:
        """Return the bytes that a slice needs beside the kinds that are there; 0: unknown.

        Its kinds may grow to their largest size so far. Functions with the optimizer's state update
        it, load it or save it, and compute no passes.
        """
        entry, needed = self._table.find(use.instance), self.needed.get(use.instance)
        if entry is None or needed is None:
            return 0
        needed_bytes = needed.passes if use.kinds else needed.total
        if TensorKind.OPTIMIZER in use.kinds:
            needed_bytes = needed.update
        growth_bytes = sum(
            place.growth_bytes
            for kind, place in entry.places.items()
            if not use.kinds or kind in use.kinds
        )
        return max(0, needed_bytes - sum(entry.most_bytes.values())) + growth_bytes
