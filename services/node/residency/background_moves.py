"""Moves beside the holder of a time slice: loads of what is needed next, and copies of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from meshrl.common.api.node import KindMove, KindUse, PrepareResidency
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.services.node.residency.accelerator_state import AcceleratorState
from meshrl.services.node.residency.kind_moves import KindMover, MoveResults
from meshrl.services.node.residency.kind_table import KindTable
from meshrl.services.node.residency.residency_plan import (
    PlannedMove,
    plan_prefetch,
    plan_write_back,
)


class BackgroundMoves:
    """Prefetch and write-back, one kind at a time, so that an order can be next."""

    def __init__(
        self, lock: asyncio.Lock, table: KindTable, mover: KindMover, accelerator: AcceleratorState
    ) -> None:
        """Create it; only the task that has the `lock` moves kinds."""
        self._lock, self._table, self._mover = lock, table, mover
        self._accelerator = accelerator
        self.holder: KindUse | None = None  # of the last order: it may compute

    async def run(
        self, request: PrepareResidency, results: MoveResults, is_preempted: Callable[[], bool]
    ) -> None:
        """Load what is needed first, then write back what will leave, until nothing is left to do.

        `is_preempted` is called between two kinds.
        """
        expected = request.expected or [KindUse(request.instance, request.kinds)]
        staying: set[str] = set()  # whose processes have failed to move
        is_described = False
        while not is_preempted():
            async with self._lock:
                if not is_described:
                    await self._table.refresh(
                        {use.instance for use in self._list_computing(request)}
                    )
                    is_described = True
                if is_preempted():
                    return
                computing = self._list_computing(request)  # also one granted in the meantime
                snapshot = self._accelerator.make_snapshot(computing, expected, staying=staying)
                reserved = self._accelerator.compute_further_bytes(computing, expected)
                planned = plan_prefetch(snapshot) or plan_write_back(snapshot, reserved)[:1]
                if not planned:
                    return
                counts = len(results.moves), len(results.failures)
                names = frozenset(use.instance for use in computing)
                try:
                    await self._mover.run(planned, results, names)
                finally:
                    self._note_prefetched(results.moves[counts[0] :])
                staying |= {move.instance for move, _ in results.failures[counts[1] :]}
                if counts == (len(results.moves), len(results.failures)):
                    return

    def loads_for(self, request: PrepareResidency) -> bool:
        """Return True if the present move brings a kind that an order needs."""
        return any(move.action == "load" and is_of(move, request) for move in self._mover.active)

    def _list_computing(self, request: PrepareResidency) -> list[KindUse]:
        return [*request.computing, *([self.holder] if self.holder is not None else [])]

    def _note_prefetched(self, moves: Sequence[KindMove]) -> None:
        for move in moves:
            entry = self._table.find(move.instance)
            if entry is not None and move.target == Tier.ACCELERATOR:
                entry.prefetched_bytes[move.kind] = move.size_bytes


def is_of(move: PlannedMove, request: PrepareResidency) -> bool:
    """Return True for a move of a kind that an order needs."""
    is_kind = not request.kinds or move.kind in request.kinds
    return move.instance == request.instance and is_kind
