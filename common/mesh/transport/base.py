"""The transport protocol, which both the production sockets and the simulated network implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from meshrl.common.base.encoding.messages import Frame

# who sent a request, as only its receiver's transport knows it; empty for what comes back to a
# caller
Peer = bytes
Frames = Sequence[Frame]
DeliverCallback = Callable[[Peer, list[Frame], str], None]
PeerLostCallback = Callable[[str, bool, bool], None]
RequesterGoneCallback = Callable[[Peer], None]


class Transport(Protocol):
    """Carries frames between processes, and tells which process has gone; frames may be lost."""

    @property
    def address(self) -> str:
        """Where others reach this process."""

    @property
    def rejected_connections(self) -> Mapping[str, int]:
        """How many connections were turned away so far, by reason."""

    def start(
        self,
        deliver: DeliverCallback,
        on_peer_lost: PeerLostCallback,
        on_requester_gone: RequesterGoneCallback,
    ) -> None:
        """Runs `deliver(peer, frames, role)` on the loop for every message from now on; never
        before. `role` is what the sender of a request has proved to be, empty where nobody proves
        anything.

        `lost(address, reached, refused)`: the process at `address` has gone; unless `reached`,
        nothing sent to it has arrived; `refused`: something is there, and the two could not prove
        to each other that they are of one mesh. `gone(peer)`: a requester has gone.
        """

    def send(self, address: str, frames: Frames) -> None:
        """A request towards `address`. Never blocks; what the peer cannot take yet is parked.
        Overloaded at the bound.
        """

    def reply(self, peer: Peer, frames: Frames) -> None:
        """Sends an answer to the requester, parking like `send`; `gone` reports a lost peer."""

    def find_owner(self, peer: Peer) -> str | bytes:
        """Who sent the request that was last delivered from `peer`: the key that it has proved
        where each process has one, over all its connections; else this connection alone.
        """

    def disconnect(self, address: str) -> None:
        """Closes the connection to `address`, if there is one; the next `send` opens another."""

    async def close(self) -> None:
        """Sends what is parked for a short while, then closes all connections."""
