"""Transport protocol, implemented by the production sockets and the simulated network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from meshrl.common.base.encoding.messages import Frame

# Sender of a request, an id of its receiver's transport; empty for answers to a caller.
Peer = bytes
Frames = Sequence[Frame]
DeliverCallback = Callable[[Peer, list[Frame], str], None]
PeerLostCallback = Callable[[str, bool, bool], None]
RequesterGoneCallback = Callable[[Peer], None]


class Transport(Protocol):
    """Transport of frames between processes, which also detects exited processes; frames may be
    lost.
    """

    @property
    def address(self) -> str:
        """Address at which other processes reach this one."""

    @property
    def rejected_connections(self) -> Mapping[str, int]:
        """Number of rejected connections so far, by reason."""

    def start(
        self,
        deliver: DeliverCallback,
        on_peer_lost: PeerLostCallback,
        on_requester_gone: RequesterGoneCallback,
    ) -> None:
        """Start running `deliver(peer, frames, role)` on the loop for every message, never earlier.

        `role` is the role that the sender has proved, empty without authentication.

        `on_peer_lost(address, reached, refused)`: the process at `address` has gone. Unless
        `reached`, no message to it has arrived. `refused`: a process is there, but the two could
        not authenticate each other as members of one mesh. `on_requester_gone(peer)`: a requester
        has gone.
        """

    def send(self, address: str, frames: Frames) -> None:
        """Send a request to `address`. Never blocks; parks messages that the peer cannot take yet.

        Raises Overloaded at the bound.
        """

    def reply(self, peer: Peer, frames: Frames) -> None:
        """Send an answer to the requester, parking like `send`; `on_requester_gone` reports a lost
        peer.
        """

    def find_owner(self, peer: Peer) -> str | bytes:
        """Return the sender of the last request from `peer`.

        This is the key that the sender proved, over all its connections, where each process has a
        key. Otherwise it is the connection.
        """

    def disconnect(self, address: str) -> None:
        """Close the connection to `address`, if there is one; the next `send` opens another."""

    async def close(self) -> None:
        """Send parked messages for a short while, then close all connections."""
