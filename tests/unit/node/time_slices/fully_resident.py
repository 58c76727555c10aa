"""Residency of workers without a byte budget."""

from __future__ import annotations

from meshrl.common.api.node import PrepareResidency, ResidencyReport, ResidencyState


class FullyResident:
    """Residency of a worker whose instances keep all their tensors on its accelerator."""

    async def prepare(self, order: PrepareResidency) -> ResidencyReport:
        """Return at once: nothing has to move."""
        return ResidencyReport(is_complete=True, moves=[], prefetched_bytes=0)

    def state(self) -> ResidencyState:
        """Return an unlimited budget, of which no instance's kinds ever leave."""
        return ResidencyState(accelerator_budget=0, instances=[], rates={})
