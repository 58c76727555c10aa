"""Lends a hybrid's gradient to other ranks: here as a file, elsewhere their rows in bulk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Set
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.ranks import MOVE_S, LentGradient
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.trainer.compute.gradient_transfer import FILE_S, Outbox, write

Cut = Callable[[NDArray[np.float32], int], NDArray[np.float32]]  # the rows of a rank


class Lending:
    """Rank 0's; `far` are the ranks on other hosts."""

    def __init__(self, mesh: Mesh, job: str, ranks: int, directory: Path) -> None:
        self._mesh, self._job, self._ranks = mesh, job, ranks
        self._shelf = directory / "lent" / job  # files of float32 numbers, and nothing else
        self._outbox: Outbox | None = None  # opened for the first gang over hosts
        self._one = asyncio.Lock()  # the outbox holds those rows of one gradient
        self._far: Set[int] = frozenset()

    async def begin(self, far: Set[int]) -> None:
        """A gang forms anew: what an earlier one had lent is removed."""
        run = self._mesh.host.run_blocking
        await run(shutil.rmtree, self._shelf, True, deadline_s=FILE_S)
        self._far = far
        if far and self._outbox is None:
            name = f"core@{self._job}"
            self._outbox = await run(Outbox, self._mesh, name, deadline_s=MOVE_S)

    @asynccontextmanager
    async def lent(
        self, generation: int, index: int, gradient: NDArray[np.float32], cut: Cut
    ) -> AsyncIterator[list[LentGradient]]:
        """The orders for ranks 1 and on, which hold within the block; StorageFull."""
        outbox, far, run = self._outbox, sorted(self._far), self._mesh.host.run_blocking
        near, orders = LentGradient(generation, index, 0), dict[int, LentGradient]()
        async with AsyncExitStack() as held:
            if len(far) < self._ranks - 1:
                path = self._shelf / f"{generation}-{index}"
                await run(write, gradient.data.cast("B"), path, deadline_s=FILE_S)
                held.push_async_callback(run, path.unlink, True, deadline_s=FILE_S)
                near = LentGradient(generation, index, gradient.size, str(path))
            if far and outbox is not None:
                await held.enter_async_context(self._one)
                parts = [await run(cut, gradient, rank, deadline_s=MOVE_S) for rank in far]
                held.push_async_callback(outbox.clear)
                pieces = await outbox.put_parts(parts)
                for rank, part, some in zip(far, parts, pieces, strict=True):
                    about = generation, index, part.size
                    orders[rank] = LentGradient(*about, bulk=outbox.address, pieces=some)
            yield [orders.get(rank, near) for rank in range(1, self._ranks)]
