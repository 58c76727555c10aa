"""The production transport over ZeroMQ: a ROUTER for requests to this process, a DEALER for each
peer, both pumped by hand on the event loop.

ZeroMQ's file descriptor is edge triggered: after every send a drain is scheduled, or calls stall. A
mandatory ROUTER says EAGAIN for a peer at its high-water mark; what it refuses is parked per peer,
in order, and retried on every drain and on a timer. A DEALER's monitor tells within milliseconds
that its peer's process has ended.

On the wire a header has its length before it, and a small body behind it in the same frame: every
frame is a box of its own to CURVE. With keys every connection is CURVE: both ends prove that they
belong to the mesh, and a request comes with the role that its sender has proved.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.errors import ConfigError, Overloaded
from common.settings import advertised_host
from common.transport.base import Deliver, Frames, Gone, Lost, Peer
from common.transport.doorkeeper import Doorkeeper
from common.transport.keys import MeshKeys
from common.wire.frames import DEFAULT_LIMITS, Frame, MessageLimits

DRAIN_MESSAGES = 256  # a turn of the loop stays under ~5 ms
BURST = 16  # messages written in one go: enough to share a wake-up, few enough to overlap with work
RETRY_S = 0.005
COPY_BYTES = 65_536  # below this a copy is cheaper than a reference counted across threads
JOIN_BYTES = (
    4096  # a body up to this travels in the header's frame; copying it costs less than a frame
)
LENGTH_BYTES = 2  # of the header, little endian, where a message begins
LINGER_MS = 300  # last replies on the way out
MAX_SOCKETS = 16_384  # libzmq's own limit is 1,023
_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | _REFUSED


class _Pump:
    """One socket on the loop: reads what there is, writes what fits, parks the rest.

    What one turn of the loop sends is written in bursts: ZeroMQ's own thread then finds several
    messages at each wake-up, which saves a fifth of a call's CPU time.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        routes: bool,
        park_messages: int,
        door: Doorkeeper | None = None,
    ) -> None:
        self.socket = socket
        self._door = door
        self._roles: dict[Peer, str] = {}  # of connections, since the last one was admitted
        self._admitted = 0
        # zmq.Socket's own send and recv are wrappers in Python; the compiled ones beneath take half
        # the time
        raw: Any = super(zmq.Socket, socket)
        self._send = raw.send
        self._recv = raw.recv
        self._routes = routes
        self._park_messages = park_messages
        self._outbox: list[tuple[Peer, Frames]] = []  # sent in this turn
        self._parked: dict[Peer, deque[Frames]] = {}  # refused by the socket for now
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._retry: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, deliver: Deliver, gone: Gone) -> None:
        self._loop, self._deliver, self._gone = loop, deliver, gone
        loop.add_reader(self.socket.fileno(), self.turn)
        self._schedule()

    def send(self, peer: Peer, frames: Frames) -> None:
        waiting = self._parked.get(peer) if self._parked else None
        if len(self._outbox if waiting is None else waiting) >= self._park_messages:
            raise Overloaded(f"{self._park_messages} messages wait to be sent")
        if waiting is not None:
            waiting.append(frames)
            return
        self._outbox.append((peer, frames))
        if len(self._outbox) >= BURST:
            self._write_out()
        if not self._scheduled:
            self._schedule()

    def turn(self) -> bool:
        """Writes, then reads and delivers; whether there may be more, for which another turn is
        scheduled.
        """
        self._scheduled = False
        if self.socket.closed:
            return False
        self._write_out()
        recv, deliver, routes = self._recv, self._deliver, self._routes
        guarded, role = self._door is not None, ""
        again = True  # also when `deliver` raises: the descriptor will not fire for what is left
        try:
            for _ in range(DRAIN_MESSAGES):
                peer = recv(_NOW) if routes else b""
                frame = recv(_NOW, False)
                if guarded:
                    role = self._role(peer, frame)
                first = frame.bytes
                ends = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "little")
                frames: list[Frame] = [first[LENGTH_BYTES:ends]]
                if len(first) > ends:
                    frames.append(first[ends:])
                while frame.more:
                    frame = recv(_NOW, False)
                    frames.append(frame.bytes if len(frame) < COPY_BYTES else frame.buffer)
                deliver(peer, frames, role)
                if self.socket.closed:
                    return False
        except zmq.Again:
            again = False
        finally:
            # a write may swallow the edge by which the descriptor tells of arrivals: read after it
            wrote = self._write_out()
            if (again or wrote) and not self._scheduled and not self.socket.closed:
                self._schedule()
        return again

    def _role(self, peer: Peer, frame: Any) -> str:
        """What the sender has proved to be. Asking its connection costs a microsecond, so it is
        remembered until anybody connects, who might come under the name of one that has gone.
        """
        assert self._door is not None
        if self._door.admitted != self._admitted:
            self._admitted = self._door.admitted
            self._roles.clear()
        role = self._roles.get(peer)
        if role is None:
            role = self._roles[peer] = frame.get("User-Id")
        return role

    def _write_out(self) -> bool:
        """Sends what fits; whether anything did."""
        wrote = bool(self._parked) and self._unpark()
        if not self._outbox:
            return wrote
        outbox, self._outbox = self._outbox, []
        for peer, frames in outbox:
            if self._parked and peer in self._parked:
                self._parked[peer].append(frames)
                continue
            try:
                self._write(peer, frames)
            except zmq.Again:
                self._parked[peer] = deque([frames])
            except zmq.ZMQError as error:
                self._unreachable(peer, error)
        if self._parked:
            self._retry_soon()
        return True

    def _unpark(self) -> bool:
        wrote = False
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
                self._unreachable(peer, error)
        if self._parked:
            self._retry_soon()
        return wrote

    def _write(self, peer: Peer, frames: Frames) -> None:
        send = self._send
        if self._routes:
            send(peer, _MORE)
        first = len(frames[0]).to_bytes(LENGTH_BYTES, "little") + frames[0]
        rest = frames[1:]
        if rest and 0 < len(rest[0]) <= JOIN_BYTES:
            first += rest[0]
            rest = rest[1:]
        send(first, _MORE if rest else _NOW)
        last = len(rest) - 1
        for place, frame in enumerate(rest):
            send(frame, _MORE if place < last else _NOW, len(frame) < COPY_BYTES)

    def _unreachable(self, peer: Peer, error: zmq.ZMQError) -> None:
        if error.errno != zmq.EHOSTUNREACH or self._loop is None:
            raise error
        self._parked.pop(peer, None)
        self._loop.call_soon(self._gone, peer)

    def _retry_soon(self) -> None:
        if self._retry is None and self._loop is not None:
            self._retry = self._loop.call_later(RETRY_S, self._retried)

    def _retried(self) -> None:
        self._retry = None
        self.turn()

    def _schedule(self) -> None:
        if self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self.turn)

    @property
    def parked(self) -> int:
        return sum(map(len, self._parked.values()))

    def close(self, linger_ms: int) -> None:
        if self.socket.closed:
            return
        if linger_ms:
            self._write_out()
        if self._retry is not None:
            self._retry.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self.socket.fileno())
        self.socket.close(linger_ms)


class _Link:
    """Our DEALER to one peer, and the monitor that sees the connection end."""

    def __init__(
        self, pump: _Pump, loop: asyncio.AbstractEventLoop, ended: Callable[[bool, bool], None]
    ) -> None:
        self.pump = pump
        self._loop = loop
        self._ended = ended
        self._reached = False
        self._monitor = pump.socket.get_monitor_socket(_ENDED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        loop.add_reader(self._monitor.fileno(), self._look)
        loop.call_soon(self._look)

    def _look(self) -> None:
        while not self._monitor.closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._reached = True
                continue
            while self.pump.turn():  # the peer may have answered before it ended
                pass
            self._ended(self._reached, bool(event & _REFUSED))

    def close(self, linger_ms: int) -> None:
        if not self._monitor.closed:
            self._loop.remove_reader(self._monitor.fileno())
            self.pump.socket.disable_monitor()
            self._monitor.close(0)
        self.pump.close(linger_ms)


class ZmqTransport:
    """Listens as soon as it is made (so that `address` is known), reads once it is started.

    `bind` is a ZeroMQ endpoint; `*` as its port takes any free one. `advertise` is the host (or
    whole endpoint) under which others reach it, when that differs. Without `keys` anybody is
    served, and whatever answers at an address is believed: for tests alone.
    """

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:*",
        advertise: str = "",
        *,
        keys: MeshKeys | None = None,
        hwm: int = 1000,
        park_messages: int = 10_000,
        limits: MessageLimits = DEFAULT_LIMITS,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._hwm, self._park_messages, self._limits = hwm, park_messages, limits
        self._keys = keys
        router = self._socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)
        self._door = Doorkeeper(self._context, router, keys) if keys is not None else None
        self._router = _Pump(router, True, park_messages, self._door)
        try:
            router.bind(bind)
        except zmq.ZMQError as error:
            router.close(0)
            self._context.term()
            raise ConfigError(
                f"cannot listen on {bind}: {error}",
                where="mesh.bind",
                fix="Take an address of this host, and * or a free port behind it",
            ) from None
        bound = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.address = _advertised(bound.decode(), advertise)
        self._links: dict[str, _Link] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, self._hwm)
        socket.set(zmq.RCVHWM, self._hwm)
        socket.set(zmq.MAXMSGSIZE, self._limits.buffer_bytes)
        socket.set(zmq.CONNECT_TIMEOUT, 5_000)
        socket.set(zmq.HEARTBEAT_IVL, 3_000)  # finds hosts that vanish without closing
        socket.set(zmq.HEARTBEAT_TIMEOUT, 15_000)
        return socket

    @property
    def refused(self) -> dict[str, int]:
        """How many connections were turned away so far, by reason; see `Doorkeeper.refused`."""
        return dict(self._door.refused) if self._door is not None else {}

    def start(self, deliver: Deliver, lost: Lost, gone: Gone) -> None:
        """Begins to deliver messages on the running loop; see `Transport.start`."""
        self._loop = asyncio.get_running_loop()
        self._deliver, self._lost, self._gone = deliver, lost, gone
        self._router.start(self._loop, deliver, gone)

    def send(self, address: str, frames: Frames) -> None:
        """Sends a request to `address`, over a new connection if there is none. Overloaded: too
        many are parked.
        """
        link = self._links.get(address)
        if link is None:
            link = self._connect(address)
        link.pump.send(b"", frames)

    def reply(self, peer: Peer, frames: Frames) -> None:
        """Sends an answer to who asked. Overloaded: too many are parked."""
        self._router.send(peer, frames)

    def _connect(self, address: str) -> _Link:
        assert self._loop is not None, "start() comes before send()"
        socket = self._socket(zmq.DEALER)
        if self._keys is not None:
            socket.set(zmq.CURVE_SERVERKEY, self._keys.answering.public)
            socket.set(zmq.CURVE_PUBLICKEY, self._keys.asking.public)
            socket.set(zmq.CURVE_SECRETKEY, self._keys.asking.secret)
        pump = _Pump(socket, False, self._park_messages)

        def ended(reached: bool, refused: bool) -> None:
            if self._links.get(address) is link:
                self.forget(address)
                self._lost(address, reached, refused)

        link = self._links[address] = _Link(pump, self._loop, ended)
        pump.start(self._loop, self._deliver, self._gone)
        pump.socket.connect(address)
        return link

    def forget(self, address: str) -> None:
        """Closes the connection to `address` at once; what it has parked is dropped."""
        link = self._links.pop(address, None)
        if link is not None:
            link.close(0)

    @property
    def parked(self) -> int:
        """The number of messages that wait for peers that cannot take them yet."""
        pumps = [self._router, *(link.pump for link in self._links.values())]
        return sum(pump.parked for pump in pumps)

    async def close(self) -> None:
        """Sends what is parked for up to LINGER_MS, then closes all connections."""
        for link in list(self._links.values()):
            link.close(LINGER_MS)
        self._links.clear()
        self._router.close(LINGER_MS)
        loop = asyncio.get_running_loop()
        # Once handed over it runs to its end, even if who waits for it is cancelled.
        await asyncio.shield(loop.run_in_executor(None, self._context.term))


def _advertised(bound: str, advertise: str) -> str:
    if not advertise:
        return bound
    if re.fullmatch(r"\w+://.+:\d+", advertise):
        return advertise
    return f"tcp://{advertised_host(advertise)}:{bound.rsplit(':', 1)[1]}"
