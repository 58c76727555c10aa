"""Transfer of a hybrid's gradient to other ranks: a file on this host, bulk pieces elsewhere."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Set
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.ranks import STATE_TRANSFER_TIMEOUT_S, AddGradient
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.trainer.compute.gradient_transfer import (
    FILE_TIMEOUT_S,
    GradientOutbox,
    write_gradient_file,
)

SliceGradient = Callable[[NDArray[np.float32], int], NDArray[np.float32]]  # a rank's rows


class RankGradientTransfer:
    """Transfer of rank 0's gradients to the other ranks, of which some are on other hosts."""

    def __init__(self, mesh: Mesh, job: str, ranks: int, directory: Path) -> None:
        self._mesh, self._job, self._ranks = mesh, job, ranks
        self._directory = directory / "lent" / job  # files of float32 numbers only
        self._outbox: GradientOutbox | None = None  # created for the first gang over several hosts
        self._outbox_lock = asyncio.Lock()  # the outbox has the rows of one gradient
        self._remote_ranks: Set[int] = frozenset()

    async def reset(self, remote_ranks: Set[int]) -> None:
        """Remove an earlier group's gradients, and set the ranks on other hosts."""
        run = self._mesh.host.run_blocking
        await run(shutil.rmtree, self._directory, True, deadline_s=FILE_TIMEOUT_S)
        self._remote_ranks = remote_ranks
        if remote_ranks and self._outbox is None:
            name = f"core@{self._job}"
            self._outbox = await run(
                GradientOutbox, self._mesh, name, deadline_s=STATE_TRANSFER_TIMEOUT_S
            )

    @asynccontextmanager
    async def transfer(
        self,
        generation: int,
        round_index: int,
        gradient: NDArray[np.float32],
        slice_gradient: SliceGradient,
    ) -> AsyncIterator[list[AddGradient]]:
        """Yield the orders for ranks 1 and on, valid within the block; raise StorageFull."""
        outbox, remote_ranks, run = (
            self._outbox,
            sorted(self._remote_ranks),
            self._mesh.host.run_blocking,
        )
        local_order, orders = AddGradient(generation, round_index, 0), dict[int, AddGradient]()
        async with AsyncExitStack() as stack:
            if len(remote_ranks) < self._ranks - 1:
                path = self._directory / f"{generation}-{round_index}"
                await run(
                    write_gradient_file, gradient.data.cast("B"), path, deadline_s=FILE_TIMEOUT_S
                )
                stack.push_async_callback(run, path.unlink, True, deadline_s=FILE_TIMEOUT_S)
                local_order = AddGradient(generation, round_index, gradient.size, str(path))
            if remote_ranks and outbox is not None:
                await stack.enter_async_context(self._outbox_lock)
                parts = [
                    await run(slice_gradient, gradient, rank, deadline_s=STATE_TRANSFER_TIMEOUT_S)
                    for rank in remote_ranks
                ]
                stack.push_async_callback(outbox.clear)
                pieces = await outbox.put_parts(parts)
                for rank, part, some in zip(remote_ranks, parts, pieces, strict=True):
                    about = generation, round_index, part.size
                    orders[rank] = AddGradient(*about, bulk_address=outbox.address, chunks=some)
            yield [orders.get(rank, local_order) for rank in range(1, self._ranks)]
