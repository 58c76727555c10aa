"""First version of a run: its initial weights, after the warm start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from meshrl.common.api.ranks import COMPUTE_TIMEOUT_S
from meshrl.common.base.files import corruption
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state import events
from meshrl.services.trainer.compute.piece_runner import WARM_START
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.initialization.initial_weights import (
    ReportCorruption,
    StepwiseWork,
    add_adapters,
    create_first_weights,
    initialize_learner,
)

T = TypeVar("T")

SLICE_S = 0.2  # of a warm start; engines use the same length


class FirstVersionBuilder:
    """Builder of version 0; `warm_start_fraction` is the finished share of its warm start."""

    def __init__(self, mesh: Mesh, data: JobData, compute: GangCompute) -> None:
        self._mesh, self._data, self._compute = mesh, data, compute
        self._learner = compute.local_learner
        self.warm_start_fraction = 0.0

    def add_adapters(self) -> None:
        """Attach adapters to the learner of a single process; ranks attach theirs themselves."""
        if self._learner is not None:
            add_adapters(self._data, self._learner)

    async def build(self) -> bool:
        """Load version 0 into the compute; return True if its warm start was cached."""
        total = max(1, self._data.config.warm_start.steps)

        def progress(step: int, loss: float) -> None:
            self.warm_start_fraction = step / total

        damaged: list[dict[str, Any]] = []
        cached = await self._build_weights(progress, damaged.append)
        for fields in damaged:
            append = partial(events.append, self._mesh.state, corruption.CORRUPTION_EVENT, fields)
            await retry(self._mesh.clock, append)
        return cached

    async def _build_weights(
        self, progress: Callable[[int, float], None], report_corruption: ReportCorruption
    ) -> bool:
        if self._learner is not None:
            return await self.run_in_slices(
                initialize_learner(self._data, self._learner, progress, report_corruption)
            )
        weights, cached = await self.run_in_slices(
            create_first_weights(self._data, progress, report_corruption)
        )
        await self._compute.form_group()  # now, because ranks hold memory from here on
        if weights is not None:
            await self._compute.load_weights(weights)
        return cached

    async def run_in_slices(self, work: StepwiseWork[T]) -> T:
        """Run `work` in time slices of `SLICE_S` each, and return its result."""
        clock, found = self._mesh.clock, list[T]()

        def compute() -> None:
            until = clock.monotonic() + SLICE_S
            try:
                next(work)
                while clock.monotonic() < until:
                    next(work)
            except StopIteration as ended:
                found.append(ended.value)

        runner = self._compute.runner

        async def run_slice() -> None:
            async with runner.use_kinds(WARM_START):
                await self._mesh.host.run_blocking(compute, deadline_s=COMPUTE_TIMEOUT_S)

        while not found:
            await runner.time_slices.run_in_slice(
                WARM_START.function, run_slice, kinds=WARM_START.tensor_kinds
            )
        return found[0]
