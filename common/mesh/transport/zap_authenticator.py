"""Thread that authenticates connections to a ROUTER, and counts the rejected ones.

ZeroMQ requests the holder of a peer's key over ZAP (RFC 27). A thread answers, because the event
loop may block for minutes while a model loads. Peers would then miss the deadline of their
handshakes. The thread also reads the ROUTER's monitor, because a full monitor would block its
writer. The monitor reports peers from outside the mesh, which cannot begin a handshake.
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
# The key cannot be looked up now: the peer receives this status and retries. After RFC 27's 300,
# libzmq sends no answer and keeps the connection until its handshake times out.
UNDECIDED_STATUS = b"500"
MAX_MONITOR_EVENTS = 10_000  # queued events of the monitor; about 2 MB
_MONITOR = "inproc://doorkeeper"
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZapAuthenticator:
    """Authenticator of one ROUTER, to create before it listens. Its thread ends with the
    context.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        keys: TransportKeys,
        limits: ConnectionLimits | None = None,
    ) -> None:
        # Replaced whenever a connection arrives or a role may have changed: cached facts about
        # connections may then be out of date.
        self.change_marker = object()
        # "keys": the key is not registered. "handshake": the handshake failed before that.
        # "descriptors": none was left to accept a connection. "undecided": Redis did not
        # answer. Others: see `ConnectionLimits`.
        self.rejected_connections: Counter[str] = Counter()
        self.keys = keys
        self._zap_socket = context.socket(zmq.REP)
        self._zap_socket.set(zmq.LINGER, 0)
        self._zap_socket.bind("inproc://zeromq.zap.01")
        self.has_process_keys = isinstance(keys, ProcessKeys)  # no two processes share a key
        keys.add_change_listener(self._note_change)
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.CURVE_SECRETKEY, keys.own_pair.secret)
        router.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # reject connections without our answer
        self._unauthenticated = (
            UnauthenticatedPeers(limits, self.rejected_connections) if limits is not None else None
        )
        connection_events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED if limits is not None else 0
        router.monitor(_MONITOR, _HANDSHAKE_FAILURES | zmq.EVENT_ACCEPT_FAILED | connection_events)
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
        """Answer a ZAP request. The User-Id identifies the caller for
        `TransportKeys.find_current_roles`.
        """
        status, user = b"400", ""
        # [version, id, domain, address, routing id, mechanism, key], as RFC 27 has it
        if len(request) == 7 and request[2] == ZAP_DOMAIN and request[5] == b"CURVE":
            public = z85.encode(request[6])
            try:
                role = self.keys.find_roles(public)
            except StateUnavailable:
                self.rejected_connections["undecided"] += 1
                status, role = UNDECIDED_STATUS, None
            if role is not None:
                self._note_change()  # before its first message can arrive
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
            self.rejected_connections["descriptors"] += 1
        elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            if event["value"] != int(UNDECIDED_STATUS):  # counted when it is answered
                self.rejected_connections["keys"] += 1
        elif event["event"] & _HANDSHAKE_FAILURES:
            self.rejected_connections["handshake"] += 1
