"""The thread that decides who may connect to a ROUTER, and counts whom it turned away.

ZeroMQ asks over ZAP (RFC 27) whose key a peer has proved. A thread answers and not the event loop,
which may stand still for minutes while a model loads: peers would miss their handshake's deadline
one after the other. The ROUTER's monitor is read here for the same reason, as its writer would
block: it tells of those who cannot even begin a handshake, being from outside the mesh.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from meshrl.common.base.errors import StateUnavailable
from meshrl.common.mesh.transport.keys import ProcessKeys, TransportKeys
from meshrl.common.mesh.transport.unauthenticated_peers import (
    ConnectionLimits,
    UnauthenticatedPeers,
)

ZAP_DOMAIN = b"meshrl"
# Nobody can tell now whose key that is: the other end hears this and tries again. RFC 27 has 300
# for it, after which libzmq says nothing, and holds the connection until its handshake times out.
UNDECIDED_STATUS = b"500"
MAX_MONITOR_EVENTS = 10_000  # of the monitor that may wait for this thread; about 2 MB
_MONITOR = "inproc://doorkeeper"
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZapAuthenticator:
    """Guards one ROUTER: to be made before it listens. Its thread ends with the context."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        keys: TransportKeys,
        limits: ConnectionLimits | None = None,
    ) -> None:
        # Another one whenever a connection comes in or a role may be another: what is known of
        # connections may then be out of date.
        self.change_marker = object()
        # "keys": proved a key that nobody of the mesh has. "handshake": did not get that far.
        # "descriptors": there was none left to take a connection with. "undecided": Redis was
        # silent. "connections", "strangers" and "bytes": see `ConnectionLimits`.
        self.refused: Counter[str] = Counter()
        self.keys = keys
        self._zap_socket = context.socket(zmq.REP)
        self._zap_socket.set(zmq.LINGER, 0)
        self._zap_socket.bind("inproc://zeromq.zap.01")
        self.has_process_keys = isinstance(
            keys, ProcessKeys
        )  # whether no two processes share a key
        keys.add_change_listener(self._note_change)
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.CURVE_SECRETKEY, keys.own_pair.secret)
        router.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer of ours nobody comes in
        self._unauthenticated = (
            UnauthenticatedPeers(limits, self.refused) if limits is not None else None
        )
        seen = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED if limits is not None else 0
        router.monitor(_MONITOR, _HANDSHAKE_FAILURES | zmq.EVENT_ACCEPT_FAILED | seen)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.set(zmq.LINGER, 0)
        self._monitor.set(zmq.RCVHWM, MAX_MONITOR_EVENTS)
        self._monitor.connect(_MONITOR)
        self._thread = threading.Thread(target=self._run, name="doorkeeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap_socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while True:
                within_ms = (
                    self._unauthenticated.check_if_due()
                    if self._unauthenticated is not None
                    else None
                )
                for socket, _ in poller.poll(within_ms):
                    if socket is self._zap_socket:
                        self._zap_socket.send_multipart(
                            self._answer(self._zap_socket.recv_multipart())
                        )
                    else:
                        self._count_event(parse_monitor_message(self._monitor.recv_multipart()))
        except zmq.ContextTerminated:
            self._zap_socket.close()
            self._monitor.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """The User-Id of an admitted connection tells `TransportKeys.find_current_roles` who it
        is.
        """
        status, user = b"400", ""
        # [version, id, domain, address, routing id, mechanism, key], as RFC 27 has it
        if len(request) == 7 and request[2] == ZAP_DOMAIN and request[5] == b"CURVE":
            public = z85.encode(request[6])
            try:
                role = self.keys.find_roles(public)
            except StateUnavailable:
                self.refused["undecided"] += 1
                status, role = UNDECIDED_STATUS, None
            if role is not None:
                self._note_change()  # before any message of it can arrive
                status, user = b"200", self.keys.make_user_id(public, role)
        return [*request[:2], status, b"", user.encode(), b""]

    def _note_change(self) -> None:
        self.change_marker = object()

    def _count_event(self, event: Any) -> None:
        if event["event"] == zmq.EVENT_ACCEPTED and self._unauthenticated is not None:
            self._unauthenticated.add_connection(int(event["value"]))
        elif event["event"] == zmq.EVENT_DISCONNECTED and self._unauthenticated is not None:
            self._unauthenticated.remove_connection(int(event["value"]))
        elif event["event"] == zmq.EVENT_ACCEPT_FAILED:
            self.refused["descriptors"] += 1
        elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            if event["value"] != int(UNDECIDED_STATUS):  # which is counted when it is answered
                self.refused["keys"] += 1
        elif event["event"] & _HANDSHAKE_FAILURES:
            self.refused["handshake"] += 1
