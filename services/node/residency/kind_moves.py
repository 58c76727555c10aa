"""Execution of planned moves of tensor kinds by the worker's role processes, with their rates."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from meshrl.common.api.calls.role import SET_TIER_TIMEOUT_S, KindStates, MoveKinds, RoleControl
from meshrl.common.api.node import KindMove
from meshrl.common.base.errors import DeadlineExceeded, MeshError, NotFound, Refused
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.task_groups import run_all
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.services.node.residency.kind_table import KindTable, ProcessKinds
from meshrl.services.node.residency.residency_plan import KindPlace, PlannedMove

RATE_DECAY = 0.7  # factor of earlier bytes and seconds, per move
# A busy host delays even the smallest move by seconds; a larger one has several times the seconds
# that its rate predicts, and an unmeasured one those of a slow disk.
MIN_MOVE_TIMEOUT_S = 30.0
TIMEOUT_FACTOR = 8.0
SLOW_RATE = 50e6  # bytes per second


class MoveRates:
    """Measured bytes per second of copies, by direction. Recent moves count more."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}  # bytes, seconds

    def record(self, source: str, target: str, size_bytes: int, duration_s: float) -> None:
        """Record a copy of `size_bytes` that took `duration_s` seconds."""
        total_bytes, total_s = self._sums.get(f"{source}>{target}", (0.0, 0.0))
        self._sums[f"{source}>{target}"] = (
            RATE_DECAY * total_bytes + size_bytes,
            RATE_DECAY * total_s + max(duration_s, 1e-6),
        )

    @property
    def by_direction(self) -> dict[str, float]:
        """Rates by `source>target` of tiers."""
        return {way: total_bytes / total_s for way, (total_bytes, total_s) in self._sums.items()}


@dataclass
class MoveResults:
    """Moves that happened, and errors of those that did not."""

    moves: list[KindMove] = field(default_factory=list)
    failures: list[tuple[PlannedMove, MeshError]] = field(default_factory=list)


class KindMover:
    """Sender of orders to role processes. The caller runs one plan at a time."""

    def __init__(
        self,
        mesh: Mesh,
        table: KindTable,
        free_bytes: Callable[[], float],
        kill: Callable[[str, int, str], Awaitable[None]],
    ) -> None:
        """Create a mover.

        Args:
            free_bytes: Returns the free bytes of the accelerator now.
            kill: Kills a generation of an instance for a reason, and returns when it is dead.
        """
        self._mesh, self._table, self._free_bytes, self._kill = mesh, table, free_bytes, kill
        self.is_closing = False  # the worker exits: its processes end without further orders
        self._changed = asyncio.Event()  # a move has ended
        self.active: Sequence[PlannedMove] = ()  # of the plan that runs now
        self._computing: frozenset[str] = frozenset()  # instances, beside that plan
        # Orders increase, also after a restart of the worker.
        self._last_order = int(mesh.clock.wall() * 1000)
        self.rates = MoveRates()

    async def run(
        self,
        planned: Sequence[PlannedMove],
        results: MoveResults,
        computing: frozenset[str] = frozenset(),
    ) -> None:
        """Run planned moves and add their outcome to `results`.

        A process of `computing` instances moves other kinds between the pieces of its slice.

        Processes move their kinds concurrently, each its own one after another; a load begins when
        there is room. A failed move ends its process's moves. A cancellation ends the moves in
        progress between two chunks.
        """
        evictions: dict[str, list[PlannedMove]] = defaultdict(list)
        loads: dict[str, list[PlannedMove]] = defaultdict(list)
        for move in planned:
            (loads if move.action == "load" else evictions)[move.instance].append(move)
        self.active, self._computing = planned, computing
        leaving = {
            instance: asyncio.create_task(self._run_sequence(moves, results), name="evict")
            for instance, moves in evictions.items()
        }
        try:
            await run_all(
                self._load(moves, leaving.get(instance), leaving, results)
                for instance, moves in loads.items()
            )
            await asyncio.gather(*leaving.values())
        finally:
            for task in leaving.values():
                task.cancel()
            if leaving:
                await asyncio.wait(leaving.values())
            self.active, self._computing = (), frozenset()

    async def _load(
        self,
        moves: Sequence[PlannedMove],
        own_evictions: asyncio.Task[None] | None,
        leaving: dict[str, asyncio.Task[None]],
        results: MoveResults,
    ) -> None:
        """Load kinds of one process in order, each when its bytes are free."""
        if own_evictions is not None:  # a process executes one order at a time
            await asyncio.wait([own_evictions])
        for move in moves:
            while self._free_bytes() < move.size_bytes:
                if all(task.done() for task in leaving.values()):
                    return  # an eviction has failed: the caller plans again
                self._changed.clear()
                waiting = asyncio.create_task(self._changed.wait())
                try:
                    await asyncio.wait(
                        [waiting, *(task for task in leaving.values() if not task.done())],
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    waiting.cancel()
            if not await self._run_move(move, results):
                return

    async def _run_sequence(self, moves: Sequence[PlannedMove], results: MoveResults) -> None:
        for move in moves:
            if not await self._run_move(move, results):
                return

    async def _run_move(self, planned: PlannedMove, results: MoveResults) -> bool:
        """Run one move; return False after recording its failure."""
        try:
            results.moves.append(await self._send(planned))
        except MeshError as error:
            results.failures.append((planned, error))
            return False
        finally:
            self._changed.set()
        return True

    async def _send(self, planned: PlannedMove) -> KindMove:
        """Order one move and record the process's answer."""
        entry = self._table.find(planned.instance)
        if entry is None:
            raise NotFound(f"{planned.instance} has no process here", where=self._mesh.name)
        self._last_order = order = self._last_order + 1
        request = MoveKinds(order, planned.action, [planned.kind], planned.tier)
        source, target = _name_tiers(planned, entry.places[planned.kind])
        clock = self._mesh.clock
        began = clock.monotonic()
        try:
            limit_s = self._limit_s(planned, source, target)
            answer = await self._table.calls.call(
                entry.instance, entry.name, RoleControl.move_kinds, request, limit_s
            )
        except asyncio.CancelledError:
            if not self.is_closing:
                await self._cancel(entry, order)
            raise
        except DeadlineExceeded as error:
            await self._kill_hung(entry, str(error))
            raise
        duration_s = clock.monotonic() - began
        self._record(entry, answer, planned)
        self._check_done(planned, entry)
        if planned.copied_bytes:
            self.rates.record(source, target, planned.copied_bytes, duration_s)
        return KindMove(
            planned.instance, planned.kind, source, target, planned.size_bytes, duration_s
        )

    def _record(self, entry: ProcessKinds, answer: KindStates, planned: PlannedMove) -> None:
        self._table.record(entry, answer, is_stale=entry.is_stale)  # true while it computes
        if planned.action != "write_back":
            entry.prefetched_bytes.pop(planned.kind, None)

    def _check_done(self, planned: PlannedMove, entry: ProcessKinds) -> None:
        """Raise Refused if the process reports another state than the order's."""
        place = entry.places.get(planned.kind)
        is_done = place is not None and {
            "load": not place.missing_bytes,
            "write_back": not place.is_dirty,
        }.get(planned.action, not place.accelerator_bytes)
        if not is_done:
            raise Refused(
                f"{entry.name} reports that its order to {planned.action} {planned.kind} has not "
                f"been done: {place}",
                where=self._mesh.name,
            )

    async def _cancel(self, entry: ProcessKinds, order: int) -> None:
        """Cancel an order; otherwise the process is described again before the next one."""
        entry.is_stale = True
        if self._table.find(entry.instance) is not entry:
            return  # its process has exited
        try:
            answer = await self._table.calls.call(
                entry.instance, entry.name, RoleControl.cancel_move, order
            )
        except DeadlineExceeded as error:
            await self._kill_hung(entry, str(error))
        except MeshError as error:
            self._mesh.log.warning("a move was not cancelled", role=entry.name, error=str(error))
        else:
            self._table.record(entry, answer)

    async def _kill_hung(self, entry: ProcessKinds, why: str) -> None:
        """Kill a process that does not answer, because it holds the accelerator."""
        why = f"it does not move its tensors: {why}"
        try:
            await self._kill(entry.instance, entry.generation, why)
        except MeshError as error:
            self._mesh.log.error("a process survives", process=entry.name, error=str(error))

    def _limit_s(self, planned: PlannedMove, source: str, target: str) -> float:
        if planned.instance in self._computing:
            return SET_TIER_TIMEOUT_S
        rate = self.rates.by_direction.get(f"{source}>{target}", SLOW_RATE)
        expected_s = planned.copied_bytes / rate
        return min(SET_TIER_TIMEOUT_S, max(MIN_MOVE_TIMEOUT_S, TIMEOUT_FACTOR * expected_s))


def _name_tiers(planned: PlannedMove, place: KindPlace) -> tuple[str, str]:
    """Return source and target of a move."""
    if planned.action == "load":
        copies = {Tier.MEMORY: place.memory_bytes, Tier.DISK: place.disk_bytes}
        return next((tier for tier, size in copies.items() if size), Tier.ABSENT), Tier.ACCELERATOR
    return Tier.ACCELERATOR, planned.tier or Tier.ABSENT
