"""The first version of a run: the weights that it begins with, after its warm start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from meshrl.common.api.ranks import COMPUTE_S
from meshrl.common.base.files import damage
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import events
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.initial.beginning import Pieces, Tell, adapt, first_weights, start

T = TypeVar("T")

SLICE_S = 0.2  # of a warm start, until others of the gang have their turns: as engines have


class FirstVersion:
    """Makes version 0; `fraction` says how much of its warm start is done."""

    def __init__(self, mesh: Mesh, data: JobData, compute: Compute) -> None:
        self._mesh, self._data, self._compute = mesh, data, compute
        self._learner = compute.alone
        self.fraction = 0.0

    def adapt(self) -> None:
        """Give a learner of one process its adapters; ranks make theirs with them."""
        if self._learner is not None:
            adapt(self._data, self._learner)

    async def make(self) -> bool:
        """Compute with version 0 from now on; True when its warm start was in the cache."""
        total = max(1, self._data.config.warm_start.steps)

        def progress(step: int, loss: float) -> None:
            self.fraction = step / total

        damaged: list[dict[str, Any]] = []
        cached = await self._made(progress, damaged.append)
        for told in damaged:
            append = partial(events.append, self._mesh.state, damage.EVENT, told)
            await patiently(self._mesh.clock, append)
        return cached

    async def _made(self, progress: Callable[[int, float], None], tell: Tell) -> bool:
        if self._learner is not None:
            return await self.in_slices(start(self._data, self._learner, progress, tell))
        weights, cached = await self.in_slices(first_weights(self._data, progress, tell))
        await self._compute.form()  # now, because ranks hold memory from here on
        if weights is not None:
            await self._compute.take(weights)
        return cached

    async def in_slices(self, pieces: Pieces[T]) -> T:
        """Return what `pieces` returns: a time slice for as many as take `SLICE_S`."""
        clock, found = self._mesh.clock, list[T]()

        def compute() -> None:
            until = clock.monotonic() + SLICE_S
            try:
                next(pieces)
                while clock.monotonic() < until:
                    next(pieces)
            except StopIteration as ended:
                found.append(ended.value)

        slice = partial(self._mesh.host.run_blocking, compute, deadline_s=COMPUTE_S)
        while not found:
            await self._compute.runner.turns.run("warm_start", slice)
        return found[0]
