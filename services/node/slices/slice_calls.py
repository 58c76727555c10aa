"""Calls of a worker's actor for time slices and residency."""

from __future__ import annotations

from meshrl.common.api.node import (
    AcquireSlice,
    ExplainSlices,
    KillInstance,
    PrepareResidency,
    ReleaseSlice,
    ResidencyReport,
    ResidencyState,
    SliceExplanation,
    TimeSlice,
    Worker,
)
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.services.node.slices.slice_scheduler import SliceScheduler


class SliceCallsMixin(Actor):
    """Calls of a worker's actor for its slice scheduler."""

    slice_scheduler: SliceScheduler

    @call(Worker.acquire_slice)
    async def acquire_slice(self, request: AcquireSlice) -> TimeSlice:
        return await self.slice_scheduler.acquire(request)

    @call(Worker.release_slice)
    def release_slice(self, request: ReleaseSlice) -> None:
        self.slice_scheduler.release(request)

    @call(Worker.prepare_residency)
    async def prepare_residency(self, order: PrepareResidency) -> ResidencyReport:
        return await self.slice_scheduler.residency.prepare(order)

    @call(Worker.read_residency)
    def read_residency(self, _: None) -> ResidencyState:
        return self.slice_scheduler.residency.state()

    @call(Worker.explain_slices)
    def explain_slices(self, request: ExplainSlices) -> SliceExplanation:
        return self.slice_scheduler.explain(request)

    @call(Worker.kill_instance)
    async def kill_instance(self, request: KillInstance) -> None:
        await self.slice_scheduler.kill_local(request)
