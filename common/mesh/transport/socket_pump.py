"""Pump of one ZeroMQ socket on the event loop: it reads, writes what fits, and parks the rest.

ZeroMQ's file descriptor is edge triggered: after every send a drain is scheduled, or calls stall. A
mandatory ROUTER returns EAGAIN for a peer at its high-water mark. The pump parks the rejected
messages per peer, in order, and retries them on every drain and on a timer.

On the wire the length precedes a header, and a small body follows in the same frame, because CURVE
encrypts each frame separately.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import zmq

from meshrl.common.base.encoding.messages import Frame
from meshrl.common.base.errors import Overloaded
from meshrl.common.mesh.transport.base import DeliverCallback, Frames, Peer, RequesterGoneCallback
from meshrl.common.mesh.transport.zap_authenticator import ZapAuthenticator

DRAIN_MESSAGES = 256  # a loop iteration stays under ~5 ms
BURST_MESSAGES = (
    16  # messages per write: enough to share a wake-up, few enough to overlap with work
)
RETRY_S = 0.005
COPY_BYTES = 65_536  # below this a copy is cheaper than a reference counted across threads
JOIN_BYTES = (
    4096  # a body up to this size shares the header's frame; a copy costs less than a frame
)
LENGTH_BYTES = 2  # size of the header's length, little endian, at the start of a message
_NO_WAIT = int(zmq.NOBLOCK)
_SEND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class SocketPump:
    """Pump of one socket on the loop.

    Messages of one loop iteration are written in bursts. ZeroMQ's own thread then finds several
    messages at each wake-up, which saves a fifth of a call's CPU time.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        is_router: bool,
        max_parked: int,
        authenticator: ZapAuthenticator | None = None,
    ) -> None:
        self.socket = socket
        self._authenticator = authenticator
        self._roles: dict[Peer, str] = {}  # by connection, since the authenticator's last change
        self.owners: dict[Peer, str] = {}  # keys by connection, likewise
        self._change_marker: object = None
        # zmq.Socket's own send and recv are Python wrappers; the compiled functions take half the
        # time.
        raw: Any = super(zmq.Socket, socket)
        self._send = raw.send
        self._recv = raw.recv
        self._is_router = is_router
        self._max_parked = max_parked
        self._outbox: list[tuple[Peer, Frames]] = []  # sent in this loop iteration
        self._parked: dict[Peer, deque[Frames]] = {}  # waiting messages, in order per peer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._retry: asyncio.TimerHandle | None = None

    def start(
        self, loop: asyncio.AbstractEventLoop, deliver: DeliverCallback, gone: RequesterGoneCallback
    ) -> None:
        """Start passing messages to `deliver`, and each peer without a connection to `gone`."""
        self._loop, self._deliver, self._on_requester_gone = loop, deliver, gone
        loop.add_reader(self.socket.fileno(), self.run_once)
        self._schedule()

    def send(self, peer: Peer, frames: Frames) -> None:
        """Send a message, in this loop iteration if there is space. Raises Overloaded if too many
        wait.
        """
        waiting = self._parked.get(peer) if self._parked else None
        if len(self._outbox if waiting is None else waiting) >= self._max_parked:
            raise Overloaded(f"{self._max_parked} messages already wait to be sent")
        if waiting is not None:
            waiting.append(frames)
            return
        self._outbox.append((peer, frames))
        if len(self._outbox) >= BURST_MESSAGES:
            self._write_out()
        if not self._scheduled:
            self._schedule()

    def run_once(self) -> bool:
        """Write, then read and deliver; return True if there may be more, and schedule another
        iteration.
        """
        self._scheduled = False
        if self.socket.closed:
            return False
        self._write_out()
        recv, deliver, routes = self._recv, self._deliver, self._is_router
        guarded, role = self._authenticator is not None, ""
        again = True  # also if `deliver` raises: the descriptor does not fire for the rest
        try:
            for _ in range(DRAIN_MESSAGES):
                peer = recv(_NO_WAIT) if routes else b""
                frame = recv(_NO_WAIT, False)
                if guarded:
                    role = self._find_role(peer, frame)
                first = frame.bytes
                ends = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "little")
                frames: list[Frame] = [first[LENGTH_BYTES:ends]]
                if len(first) > ends:
                    frames.append(first[ends:])
                while frame.more:
                    frame = recv(_NO_WAIT, False)
                    frames.append(frame.bytes if len(frame) < COPY_BYTES else frame.buffer)
                deliver(peer, frames, role)
                if self.socket.closed:
                    return False
        except zmq.Again:
            again = False
        finally:
            # a write may consume the edge that signals arrivals: read after it
            wrote = self._write_out()
            if (again or wrote) and not self._scheduled and not self.socket.closed:
                self._schedule()
        return again

    def _find_role(self, peer: Peer, frame: Any) -> str:
        """Return the role that the sender has proved.

        A query of its connection costs a microsecond, so the result is cached until a connection
        arrives or keys are revoked. A new connection may have the routing id of an earlier one.
        """
        door = self._authenticator
        assert door is not None
        if door.change_marker is not self._change_marker:
            self._change_marker = door.change_marker
            self._roles.clear()
            self.owners.clear()
        role = self._roles.get(peer)
        if role is None:
            user = frame.get("User-Id")
            role = self._roles[peer] = door.keys.find_current_roles(user)
            if door.has_process_keys:
                self.owners[peer] = user
        return role

    def _write_out(self) -> bool:
        """Send what fits; return True if a message was sent or tried for the first time."""
        outbox, self._outbox = self._outbox, []
        for peer, frames in outbox:
            self._parked.setdefault(peer, deque()).append(frames)
        wrote = bool(outbox)
        for peer, queue in list(self._parked.items()):
            try:
                while queue:
                    self._write(peer, queue[0])
                    queue.popleft()
                    wrote = True
                del self._parked[peer]
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH or self._loop is None:
                    raise
                del self._parked[peer]
                self._loop.call_soon(self._on_requester_gone, peer)
        if self._parked and self._retry is None and self._loop is not None:
            self._retry = self._loop.call_later(RETRY_S, self._on_retry_timer)
        return wrote

    def _write(self, peer: Peer, frames: Frames) -> None:
        send = self._send
        if self._is_router:
            send(peer, _SEND_MORE)
        first = len(frames[0]).to_bytes(LENGTH_BYTES, "little") + frames[0]
        rest = frames[1:]
        if rest and 0 < len(rest[0]) <= JOIN_BYTES:
            first += rest[0]
            rest = rest[1:]
        send(first, _SEND_MORE if rest else _NO_WAIT)
        last = len(rest) - 1
        for place, frame in enumerate(rest):
            send(frame, _SEND_MORE if place < last else _NO_WAIT, len(frame) < COPY_BYTES)

    def _on_retry_timer(self) -> None:
        self._retry = None
        self.run_once()

    def _schedule(self) -> None:
        if self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self.run_once)

    @property
    def parked_count(self) -> int:
        """Number of messages that the socket has rejected for now."""
        return sum(map(len, self._parked.values()))

    def close(self, linger_ms: int) -> None:
        """Close the socket, which may continue to send for `linger_ms` milliseconds."""
        if self.socket.closed:
            return
        if linger_ms:
            self._write_out()
        if self._retry is not None:
            self._retry.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self.socket.fileno())
        self.socket.close(linger_ms)
