"""Lends a hybrid's gradient to the ranks beside the first: to those of its host all of it as a
file, to others their rows over a bulk port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.api.ranks import MOVE_S, LentGradient
from common.mesh.runtime.mesh import Mesh
from services.trainer.compute.gradient_transfer import GradientFiles, Outbox

Cut = Callable[[NDArray[np.float32], int], NDArray[np.float32]]  # the rows of a rank


class Lending:
    """Rank 0's; `far` are the ranks on other hosts."""

    def __init__(self, mesh: Mesh, job: str, ranks: int, directory: Path) -> None:
        self._mesh, self._job, self._ranks = mesh, job, ranks
        self._shelf = GradientFiles(mesh, directory / "lent" / job)
        self._outbox: Outbox | None = None  # opened for the first gang over hosts
        self._one = asyncio.Lock()  # the outbox holds those rows of one gradient
        self._far: Set[int] = frozenset()

    async def begin(self, far: Set[int]) -> None:
        """A gang forms anew: what an earlier one had lent is removed."""
        await self._shelf.clear()
        self._far = far
        if far and self._outbox is None:
            name = f"core@{self._job}"
            self._outbox = await self._mesh.host.run_blocking(
                Outbox, self._mesh, name, deadline_s=MOVE_S
            )

    @asynccontextmanager
    async def lent(
        self, generation: int, index: int, gradient: NDArray[np.float32], cut: Cut
    ) -> AsyncIterator[list[LentGradient]]:
        """The orders for ranks 1 and on, which hold within the block; StorageFull."""
        async with (
            self._whole(generation, index, gradient) as near,
            self._rows(generation, index, gradient, cut) as far,
        ):
            yield [far.get(rank, near) for rank in range(1, self._ranks)]

    @asynccontextmanager
    async def _whole(
        self, generation: int, index: int, gradient: NDArray[np.float32]
    ) -> AsyncIterator[LentGradient]:
        """The order for the ranks of this host, if there are any."""
        if len(self._far) == self._ranks - 1:
            yield LentGradient(generation, index, 0)
            return
        path = await self._shelf.put(f"{generation}-{index}", gradient)
        try:
            yield LentGradient(generation, index, gradient.size, str(path))
        finally:
            await self._shelf.remove(path)

    @asynccontextmanager
    async def _rows(
        self, generation: int, index: int, gradient: NDArray[np.float32], cut: Cut
    ) -> AsyncIterator[dict[int, LentGradient]]:
        """The orders for the ranks on other hosts."""
        outbox, far = self._outbox, sorted(self._far)
        if not far or outbox is None:
            yield {}
            return

        def rows() -> list[NDArray[np.float32]]:
            return [cut(gradient, rank) for rank in far]

        async with self._one:
            parts = await self._mesh.host.run_blocking(rows, deadline_s=MOVE_S)
            try:
                pieces = await outbox.put_parts(parts)
                yield {
                    rank: LentGradient(
                        generation, index, part.size, bulk=outbox.address, pieces=some
                    )
                    for rank, part, some in zip(far, parts, pieces, strict=True)
                }
            finally:
                await outbox.clear()
