"""Table of the tensor kinds of a worker's processes, as these report them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshrl.common.api.calls.role import KindStates, RoleControl
from meshrl.common.base.errors import MeshError, UnknownMethod
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.rows import Tier, TierBytes
from meshrl.services.node.instances.budgets import Budgets
from meshrl.services.node.residency.process_calls import ProcessCalls
from meshrl.services.node.residency.residency_plan import KindPlace, bytes_on

START_ANSWER_TIMEOUT_S = 2.0  # for a process that has perhaps not joined the mesh yet


class LocalProcess(Protocol):
    """Process of the worker, as its supervisor knows it."""

    name: str
    process_key: tuple[str, int]  # instance, generation
    is_ready: bool
    tier: Tier

    @property
    def pid(self) -> int:
        """Pid; 0: no process runs now."""

    @property
    def is_time_sliced(self) -> bool:
        """True if it computes in time slices only."""

    @property
    def is_moving(self) -> bool:
        """True while the whole process changes its tier."""


@dataclass(slots=True)
class ProcessKinds:
    """Tensor kinds of one run of a process."""

    name: str
    instance: str
    generation: int
    pid: int
    tier: Tier  # of the whole process
    places: dict[str, KindPlace] = field(default_factory=dict)  # by kind; empty: it has none
    is_stale: bool = False  # it has computed since its report
    prefetched_bytes: dict[str, int] = field(default_factory=dict)  # by kind, until a time slice
    most_bytes: dict[str, int] = field(default_factory=dict)  # by kind: its largest size so far

    def describes(self, process: LocalProcess) -> bool:
        """Return True if the entry is of this run of the process, at its tier."""
        run = self.name, (self.instance, self.generation), self.pid, self.tier
        return run == (process.name, process.process_key, process.pid, process.tier)


class KindTable:
    """Kinds by instance; `Budgets` has their sums by process.

    An entry ends with its process: copies in memory and on disk stay in the budgets, because the
    worker owns them.
    """

    def __init__(
        self, mesh: Mesh, budgets: Budgets, list_processes: Callable[[], Sequence[LocalProcess]]
    ) -> None:
        self._mesh, self._budgets, self._list_processes = mesh, budgets, list_processes
        self.calls = ProcessCalls(mesh)
        self._entries: dict[str, ProcessKinds] = {}  # by instance

    @property
    def entries(self) -> list[ProcessKinds]:
        """Entries of the processes that still run."""
        for instance, entry in list(self._entries.items()):
            if not any(entry.describes(process) for process in self._list_processes()):
                del self._entries[instance]
        return list(self._entries.values())

    @property
    def places(self) -> list[KindPlace]:
        """Kinds of all instances."""
        return [place for entry in self.entries for place in entry.places.values()]

    def find(self, instance: str) -> ProcessKinds | None:
        """Return the entry of an instance; None if it has not reported, or has exited."""
        return next((entry for entry in self.entries if entry.instance == instance), None)

    def find_process(self, instance: str, generation: int) -> LocalProcess | None:
        """Return the worker's process of an instance; it may not run yet."""
        key = instance, generation
        return next((one for one in self._list_processes() if one.process_key == key), None)

    @property
    def processes(self) -> list[LocalProcess]:
        """Processes that compute in time slices."""
        return [process for process in self._list_processes() if process.is_time_sliced]

    def sum_other_bytes(self) -> TierBytes:
        """Return the bytes that are used or claimed beside the kinds in the table."""
        places = self.places

        def subtract_kinds(tier: Tier) -> int:
            kinds_bytes = sum(bytes_on(place, tier) for place in places)
            return max(0, self._budgets.sum_used_bytes(tier) - kinds_bytes)

        return TierBytes(*map(subtract_kinds, (Tier.ACCELERATOR, Tier.MEMORY, Tier.DISK)))

    async def refresh(
        self, computing: Collection[str], requester: str = "", *, calls_starting: bool = False
    ) -> None:
        """Request reports from processes whose last report is missing or stale.

        A process that does not answer keeps its last report. One that is not ready is called only
        if it is the requester, or with `calls_starting`, because it may not answer yet. Reports of
        `computing` instances are stale again at once.
        """
        known = self.entries
        if not any(place.missing_bytes for place in self.places):
            for entry in known:  # all instances may have computed without an order
                entry.is_stale = True
        stale = [
            process
            for process in self.processes
            if process.pid
            and not process.is_moving
            and (calls_starting or process.is_ready or process.process_key[0] == requester)
            and not any(entry.describes(process) and not entry.is_stale for entry in known)
        ]
        await asyncio.gather(*(self._describe(process, computing) for process in stale))

    async def _describe(self, process: LocalProcess, computing: Collection[str]) -> None:
        instance, generation = process.process_key
        pid, tier = process.pid, process.tier
        try:
            deadline_s = None if process.is_ready else START_ANSWER_TIMEOUT_S
            answer = await self.calls.call(
                instance, process.name, RoleControl.describe_kinds, None, deadline_s
            )
        except UnknownMethod:
            answer = KindStates([])
        except MeshError as error:
            self._mesh.log.warning("kinds are unknown", process=process.name, error=str(error))
            return
        earlier = self._entries.get(instance)
        entry = ProcessKinds(process.name, instance, generation, pid, tier)
        if earlier is not None and earlier.describes(process):
            entry.prefetched_bytes = earlier.prefetched_bytes
            entry.most_bytes = earlier.most_bytes
        self._entries[instance] = entry
        self.record(entry, answer, is_stale=instance in computing)
        if not entry.places:
            self._budgets.record_fixed(process.name)

    def record(self, entry: ProcessKinds, answer: KindStates, *, is_stale: bool = False) -> None:
        """Replace the kinds of a process by those that it has reported."""
        entry.is_stale = is_stale
        for state in answer.kinds:
            most_bytes = max(state.size_bytes, entry.most_bytes.get(state.kind, 0))
            entry.most_bytes[state.kind] = most_bytes
        entry.places = {
            state.kind: KindPlace(
                entry.instance,
                state.kind,
                state.size_bytes,
                state.accelerator_bytes,
                state.memory_bytes,
                state.disk_bytes,
                state.is_dirty,
                state.can_drop,
                entry.most_bytes[state.kind] - state.size_bytes,
            )
            for state in answer.kinds
        }
        if self._entries.get(entry.instance) is entry and entry.places:
            places = entry.places.values()
            self._budgets.record_kinds(
                entry.name,
                TierBytes(
                    sum(place.accelerator_bytes for place in places),
                    sum(place.memory_bytes for place in places),
                    sum(place.disk_bytes for place in places),
                ),
            )
