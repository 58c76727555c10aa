"""Rooms on the accelerator that processes have requested before they start or wake.

Other instances leave the room in a time slice of the requesting instance, so that none of them
computes then. The worker of the instance's first rank acquires it; the slice scheduler orders
the room from each worker before the grant.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from meshrl.common.base.errors import DeadlineExceeded, MeshError, StateUnavailable
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.services.node.instances.budgets import OverBudget
from meshrl.services.node.instances.desired_roles import DesiredRole

# The other ranks start at about the same time as the first. One that starts alone acquires a slice
# of its own after this time, because nothing orders its room.
FIRST_RANK_TIMEOUT_S = 20.0
RANKS_START_S = 10.0  # between the starts of an instance's ranks
POLL_S = 0.2
# A process that starts may wait for an instance that has no room beside it. If it makes no progress
# for this time, others take the room again; if the process needs it, it fails and starts once more.
START_ROOM_TIMEOUT_S = 40.0
MAX_START_ROOM_S = 300.0  # for which a start with progress keeps others from their room


class RoomMaker(Protocol):
    """Residency manager, as it makes rooms."""

    async def claim_free_room(self, desired: DesiredRole, size_bytes: int) -> bool:
        """Claim free room for a process; return False if others would have to leave.

        Raises GpuMemoryFull or StorageFull if even that would not suffice.
        """

    def has_process(self, desired: DesiredRole) -> bool:
        """Return True if the process runs."""

    async def make_room(self, desired: DesiredRole, size_bytes: int) -> None:
        """Move kinds of other instances away, none of which computes, and claim the room."""


@dataclass
class _Request:
    desired: DesiredRole
    size_bytes: int
    task: asyncio.Task[None] | None = None


@dataclass
class _Claim:
    """Claimed room of a process, by the clock's seconds."""

    claimed_at: float
    progressed_at: float

    def is_overdue(self, now: float) -> bool:
        return (
            now >= self.progressed_at + START_ROOM_TIMEOUT_S
            or now >= self.claimed_at + MAX_START_ROOM_S
        )


class StartRooms:
    """Requests for room by process name; each is a task until its room is claimed."""

    def __init__(self, mesh: Mesh, maker: RoomMaker) -> None:
        self._mesh, self._maker = mesh, maker
        self._requests: dict[str, _Request] = {}
        self._claims: dict[str, _Claim] = {}  # by process name, of rooms that may be taken again

    def note_claim(self, name: str) -> None:
        """Start the time for which a process keeps a room that it does not use."""
        now = self._mesh.clock.monotonic()
        self._claims[name] = _Claim(now, now)

    def extend(self, name: str) -> None:
        """Extend the claim of a process that makes progress, if it has one."""
        if (claim := self._claims.get(name)) is not None:
            claim.progressed_at = self._mesh.clock.monotonic()

    def end_claims(self, has_claim: Callable[[str], bool]) -> dict[str, bool]:
        """Forget claims that no longer hold; return by process if the others are overdue."""
        self._claims = {name: claim for name, claim in self._claims.items() if has_claim(name)}
        now = self._mesh.clock.monotonic()
        return {name: claim.is_overdue(now) for name, claim in self._claims.items()}

    def is_pending(self, name: str) -> bool:
        """Return True while a process waits for room."""
        return name in self._requests

    def request(self, desired: DesiredRole, size_bytes: int) -> bool:
        """Return True once a room has been claimed; raise the error if it cannot be made."""
        request = self._requests.get(desired.name)
        if request is None:
            request = self._requests[desired.name] = _Request(desired, size_bytes)
            request.task = asyncio.create_task(self._run(request), name=f"room of {desired.name}")
            request.task.add_done_callback(consume_exception)
        assert request.task is not None
        if not request.task.done():
            return False
        del self._requests[desired.name]
        request.task.result()
        return True

    def cancel(self, name: str) -> None:
        """Cancel the request of a process."""
        request = self._requests.pop(name, None)
        if request is not None and request.task is not None:
            request.task.cancel()

    async def close(self) -> None:
        """Cancel all requests and wait for their ends."""
        tasks = [request.task for request in self._requests.values() if request.task is not None]
        for name in list(self._requests):
            self.cancel(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def find(
        self, instance: str, has_process: Callable[[], bool]
    ) -> tuple[DesiredRole, int] | None:
        """Return role and bytes of an instance's request; None if its process needs none.

        Wait RANKS_START_S for a request or a process.
        """
        with contextlib.suppress(DeadlineExceeded):
            async with self._mesh.clock.timeout(RANKS_START_S, f"the start of {instance}"):
                while True:
                    for request in self._requests.values():
                        if request.desired.instance.id == instance:
                            return request.desired, request.size_bytes
                    if has_process():
                        return None
                    await self._mesh.clock.sleep(POLL_S)
        return None

    async def _run(self, request: _Request) -> None:
        desired = request.desired
        if await self._maker.claim_free_room(desired, request.size_bytes):
            return
        if desired.rank_index:
            await self._mesh.clock.sleep(FIRST_RANK_TIMEOUT_S)
            if await self._maker.claim_free_room(desired, request.size_bytes):
                return
        instance, scheduler = desired.instance, desired.slice_scheduler
        client = SliceClient(
            self._mesh,
            scheduler,
            instance.id,
            instance.generation,
            enabled=True,
            starts_process=not desired.rank_index and not self._maker.has_process(desired),
        )
        try:
            async with client.time_slice("load"):
                await self._maker.make_room(desired, request.size_bytes)
        except (OverBudget, DeadlineExceeded, StateUnavailable):
            raise
        except MeshError as error:
            raise ServiceUnavailable(
                f"{scheduler} grants no time slice to make room for {desired.name}: {error}",
                where=self._mesh.name,
            ) from None
