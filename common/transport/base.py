"""The transport protocol, which both the production sockets and the simulated network implement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from common.wire.frames import Frame

# who sent a request, as only its receiver's transport knows it; empty for what comes back to a
# caller
Peer = bytes
Frames = Sequence[Frame]
Deliver = Callable[[Peer, list[Frame]], None]
Lost = Callable[[str, bool], None]
Gone = Callable[[Peer], None]


class Transport(Protocol):
    """Carries frames between processes, and tells which process has gone; frames may be lost."""

    @property
    def address(self) -> str:
        """Where others reach this process."""

    def start(self, deliver: Deliver, lost: Lost, gone: Gone) -> None:
        """Runs `deliver(peer, frames)` on the loop for every message from now on; never before.

        `lost(address, reached)`: the process at `address` has gone; unless `reached`, nothing sent
        to it has arrived. `gone(peer)`: a requester has gone.
        """

    def send(self, address: str, frames: Frames) -> None:
        """A request towards `address`. Never blocks; what the peer cannot take yet is parked.
        Overloaded at the bound.
        """

    def reply(self, peer: Peer, frames: Frames) -> None:
        """Sends an answer to the requester, parking like `send`; `gone` reports a lost peer."""

    def forget(self, address: str) -> None:
        """Closes the connection to `address`, if there is one; the next `send` opens another."""

    async def close(self) -> None:
        """Sends what is parked for a short while, then closes all connections."""
