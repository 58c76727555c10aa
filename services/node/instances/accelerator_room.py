"""Room on a worker's accelerator for a process that starts or wakes beside others."""

from __future__ import annotations

from typing import Protocol

from meshrl.common.state.pool.scheduling.feasibility import SliceBytes
from meshrl.services.node.instances.desired_roles import DesiredRole


class AcceleratorRoom(Protocol):
    """Room that other instances of the worker may have to leave."""

    @property
    def is_limited(self) -> bool:
        """True if the accelerator's bytes are counted, so that room must be reserved."""

    def reserve(self, desired: DesiredRole, needed: SliceBytes) -> bool:
        """Return True once room is reserved for a process; False while others leave it.

        The room is that of the process's largest function.

        The reservation ends when the process reports its bytes or exits. Call again until it is
        made.

        Raises:
            GpuMemoryFull: The process does not fit, whatever leaves.
            StorageFull: There is no room for what must leave.
            MeshError: The gang grants no time slice in which others can leave.
        """

    def extend_reservation(self, name: str) -> None:
        """Extend the reservation of a process whose start makes progress."""

    def cancel_reservation(self, name: str) -> None:
        """Cancel the reservation of a process that neither starts nor wakes any more."""


class UncountedRoom:
    """Room of an accelerator whose bytes are not counted."""

    is_limited = False

    def reserve(self, desired: DesiredRole, needed: SliceBytes) -> bool:
        return True

    def extend_reservation(self, name: str) -> None:
        """Do nothing: nothing is reserved."""

    def cancel_reservation(self, name: str) -> None:
        """Do nothing: nothing is reserved."""
