"""Production transport over ZeroMQ: a ROUTER for requests to this process and a DEALER per peer.

The event loop pumps both. A DEALER's monitor reports within milliseconds that its peer's process
has exited. With keys every connection uses CURVE: both ends prove that they belong to the mesh, and
a request carries its sender's proven role.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from meshrl.common.base.encoding.messages import LIMITS
from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.listen_addresses import parse_listen_address
from meshrl.common.base.host.settings import parse_advertised_host
from meshrl.common.mesh.transport.address import parse_endpoint
from meshrl.common.mesh.transport.base import (
    DeliverCallback,
    Frames,
    Peer,
    PeerLostCallback,
    RequesterGoneCallback,
)
from meshrl.common.mesh.transport.keys import TransportKeys
from meshrl.common.mesh.transport.socket_pump import SocketPump
from meshrl.common.mesh.transport.unauthenticated_peers import ConnectionLimits
from meshrl.common.mesh.transport.zap_authenticator import UNDECIDED_STATUS, ZapAuthenticator

LINGER_MS = 300  # milliseconds for the last replies
MAX_SOCKETS = 16_384  # libzmq's own limit is 1,023
_AUTH_FAILURE = zmq.EVENT_HANDSHAKE_FAILED_AUTH  # the other end has reported it
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | _AUTH_FAILURE
)
MAX_PARKED_MESSAGES = 10_000  # per peer, beside its full queue
_HANDSHAKE_S = 30.0  # libzmq's limit from connection to answer
_SILENT_SHARE = 0.9  # of it without an answer: that is no rejection
_CONNECTION_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | _HANDSHAKE_FAILURES


class _PeerConnection:
    """DEALER to one peer, and the monitor that reports the end of its connection."""

    def __init__(
        self,
        pump: SocketPump,
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[[bool, bool], None],
        rejection_events: int,
        silence_limit_s: float,
    ) -> None:
        """Open the connection. `rejection_events` count as a rejection, unless one comes after
        `silence_limit_s`.
        """
        self.pump = pump
        self._loop = loop
        self._on_end = on_end
        self._rejection_events = rejection_events
        self._silence_limit_s, self._started_at = silence_limit_s, time.monotonic()
        self._was_reached = False
        monitored_events = _CONNECTION_ENDS | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = pump.socket.get_monitor_socket(monitored_events)
        loop.add_reader(self._monitor.fileno(), self._read_events)
        loop.call_soon(self._read_events)

    def _read_events(self) -> None:
        while not self._monitor.closed:
            try:
                heard = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            event = heard["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._was_reached = True
                continue
            while self.pump.run_once():  # the peer may have answered before it ended
                pass
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                decided = heard["value"] != int(UNDECIDED_STATUS)
            else:  # a stopped process does not answer, whatever its keys
                decided = time.monotonic() - self._started_at < self._silence_limit_s
            self._on_end(self._was_reached, bool(event & self._rejection_events) and decided)

    def close(self, linger_ms: int) -> None:
        if not self._monitor.closed:
            self._loop.remove_reader(self._monitor.fileno())
            self.pump.socket.disable_monitor()
            self._monitor.close(0)
        self.pump.close(linger_ms)


class ZmqTransport:
    """ZeroMQ transport that listens once created, so that `address` is known, and reads once
    started.

    `bind` is a ZeroMQ endpoint; `*` as its port takes any free one, `LOW-HIGH` the first free one
    of a range. `advertise` is the host (or whole endpoint) under which other processes reach it, if
    that differs. Without `keys` it serves every peer and trusts every address: for tests only.
    """

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:*",
        advertise: str = "",
        *,
        keys: TransportKeys | None = None,
        high_water_mark: int = 1000,
        connection_limits: ConnectionLimits | None = None,
        silence_is_rejection: bool = True,
        handshake_timeout_s: float = _HANDSHAKE_S,
    ) -> None:
        """Create the transport and listen.

        Args:
            connection_limits: limits of incoming connections, where other hosts can connect.
            silence_is_rejection: treat a handshake that ends without an answer as one with wrong
                keys, as between processes of one registry. Else the peer may be missing for now.
            handshake_timeout_s: a handshake without an end after this time has a stopped peer.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._high_water_mark = high_water_mark
        self._keys = keys
        self._rejection_events = _HANDSHAKE_FAILURES if silence_is_rejection else _AUTH_FAILURE
        self._handshake_timeout_s = handshake_timeout_s
        router = self._open_socket(zmq.ROUTER, bind)
        router.set(zmq.ROUTER_MANDATORY, 1)
        self._authenticator = (
            ZapAuthenticator(self._context, router, keys, connection_limits)
            if keys is not None
            else None
        )
        self._router = SocketPump(router, True, MAX_PARKED_MESSAGES, self._authenticator)
        try:
            bound = _bind(router, bind)
        except ConfigError:
            router.close(0)
            self._context.term()
            raise
        endpoint = bound
        if re.fullmatch(r"\w+://.+:\d+", advertise):
            endpoint = advertise
        elif advertise:
            endpoint = f"tcp://{parse_advertised_host(advertise)}:{bound.rpartition(':')[2]}"
        self.address = keys.make_address(endpoint) if keys is not None else endpoint
        self._connections: dict[str, _PeerConnection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def _open_socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, 1 if "[" in endpoint else 0)
        socket.set(zmq.SNDHWM, self._high_water_mark)
        socket.set(zmq.RCVHWM, self._high_water_mark)
        socket.set(zmq.MAXMSGSIZE, LIMITS.buffer_bytes)
        socket.set(zmq.CONNECT_TIMEOUT, 5_000)
        socket.set(zmq.HEARTBEAT_IVL, 3_000)  # finds hosts that vanish without closing
        socket.set(zmq.HEARTBEAT_TIMEOUT, 15_000)
        return socket

    @property
    def rejected_connections(self) -> dict[str, int]:
        """Number of rejected connections so far, by reason; see `ZapAuthenticator`."""
        return (
            dict(self._authenticator.rejected_connections)
            if self._authenticator is not None
            else {}
        )

    def start(
        self,
        deliver: DeliverCallback,
        on_peer_lost: PeerLostCallback,
        on_requester_gone: RequesterGoneCallback,
    ) -> None:
        """Start delivering messages on the running loop; see `Transport.start`."""
        self._loop = asyncio.get_running_loop()
        self._deliver, self._lost, self._gone = deliver, on_peer_lost, on_requester_gone
        self._router.start(self._loop, deliver, on_requester_gone)

    def send(self, address: str, frames: Frames) -> None:
        """Send a request to `address`, over a new connection if there is none.

        Raises Overloaded if too many messages are parked, and WrongKeys if the address names no
        key.
        """
        link = self._connections.get(address)
        if link is None:
            link = self._connect(address)
        link.pump.send(b"", frames)

    def reply(self, peer: Peer, frames: Frames) -> None:
        """Send an answer to the requester. Raises Overloaded if too many messages are parked."""
        self._router.send(peer, frames)

    def _connect(self, address: str) -> _PeerConnection:
        assert self._loop is not None, "call start() before send()"
        server_key = self._keys.find_expected_key(address) if self._keys is not None else b""
        socket = self._open_socket(zmq.DEALER, parse_endpoint(address))
        socket.set(zmq.HANDSHAKE_IVL, int(1000 * self._handshake_timeout_s))
        if self._keys is not None:
            socket.set(zmq.CURVE_SERVERKEY, server_key)
            socket.set(zmq.CURVE_PUBLICKEY, self._keys.own_pair.public)
            socket.set(zmq.CURVE_SECRETKEY, self._keys.own_pair.secret)
        pump = SocketPump(socket, False, MAX_PARKED_MESSAGES)

        def on_close(reached: bool, refused: bool) -> None:
            if self._connections.get(address) is link:
                self.disconnect(address)
                self._lost(address, reached, refused)

        link = self._connections[address] = _PeerConnection(
            pump,
            self._loop,
            on_close,
            self._rejection_events,
            _SILENT_SHARE * self._handshake_timeout_s,
        )
        pump.start(self._loop, self._deliver, self._gone)
        pump.socket.connect(parse_endpoint(address))
        return link

    def find_owner(self, peer: Peer) -> str | Peer:
        """Return the key that a process of the mesh has proved, else the peer itself."""
        return self._router.owners.get(peer, peer)

    def disconnect(self, address: str) -> None:
        """Close the connection to `address` at once and drop its parked messages."""
        link = self._connections.pop(address, None)
        if link is not None:
            link.close(0)

    @property
    def parked_count(self) -> int:
        """Number of messages parked for peers that cannot take them yet."""
        pumps = [self._router, *(link.pump for link in self._connections.values())]
        return sum(pump.parked_count for pump in pumps)

    async def close(self) -> None:
        """Send parked messages for up to LINGER_MS, then close all connections."""
        for link in list(self._connections.values()):
            link.close(LINGER_MS)
        self._connections.clear()
        self._router.close(LINGER_MS)
        loop = asyncio.get_running_loop()
        # The executor completes the call even if this coroutine is cancelled.
        await asyncio.shield(loop.run_in_executor(None, self._context.term))


def _bind(router: zmq.Socket[bytes], bind: str) -> str:
    """Bind to the first free endpoint of `bind` and return it; raise ConfigError if there is
    none.
    """
    endpoints = [bind]
    if bind.startswith("tcp://"):
        interface, tried = parse_listen_address(bind, "mesh.bind")
        endpoints = [f"tcp://{interface}:{port or '*'}" for port in tried]
    last_error: zmq.ZMQError | None = None
    for endpoint in endpoints:
        try:
            router.bind(endpoint)
            found = router.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(found, bytes)
            return found.decode()
        except zmq.ZMQError as error:
            last_error = error
            if error.errno != zmq.EADDRINUSE:
                break
    raise ConfigError(
        f"cannot listen on {bind}: {last_error}",
        where="mesh.bind",
        fix="Set an address of this host, followed by * or a range with a free port for each "
        "process",
    )
