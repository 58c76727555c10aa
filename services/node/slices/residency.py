"""Residency of the instances on one worker, as its gang's slice scheduler uses it."""

from __future__ import annotations

from typing import Protocol

from meshrl.common.api.node import PrepareResidency, ResidencyReport, ResidencyState


class Residency(Protocol):
    """Places of the tensor kinds of a worker's instances."""

    async def prepare(self, order: PrepareResidency) -> ResidencyReport:
        """Bring kinds of an instance onto the accelerator, and others off it to make room.

        Raises:
            GpuMemoryFull: The kinds do not fit, whatever leaves.
            StorageFull: There is no room for the kinds that must leave.
            NotFound: No process of this generation of the instance runs here.
        """

    def state(self) -> ResidencyState:
        """Return where the kinds are now, and the measured rates of moves."""
