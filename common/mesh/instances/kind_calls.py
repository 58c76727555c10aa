"""Calls of a role process's actor by which its worker moves kinds of its tensors."""

from __future__ import annotations

from meshrl.common.api.calls.role import KindStates, MoveKinds, RoleControl
from meshrl.common.mesh.instances.kind_controller import KindController
from meshrl.common.mesh.runtime.calls.actor import Actor, call


class KindCallsMixin(Actor):
    """Kind calls of an actor, which its table of kinds answers."""

    kinds: KindController

    @call(RoleControl.move_kinds)
    async def move_kinds(self, order: MoveKinds) -> KindStates:
        """Execute an order of the worker."""
        return await self.kinds.move_kinds(order)

    @call(RoleControl.cancel_move)
    async def cancel_move(self, number: int) -> KindStates:
        """Cancel an order of the worker."""
        return await self.kinds.cancel_move(number)

    @call(RoleControl.describe_kinds)
    def describe_kinds(self, request: None) -> KindStates:
        """Describe all kinds."""
        return self.kinds.describe_kinds()

    @call(RoleControl.unmap_segment)
    def unmap_segment(self, inode: int) -> None:
        """Unmap a memory segment that the worker has freed."""
        self.kinds.unmap_segment(inode)
