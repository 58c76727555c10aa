"""Server of a bulk port: admission, number and lifetime of connections.

It is one thread that never waits for one client, so a CANCEL on the control port never waits behind
a chunk.
"""

from __future__ import annotations

import errno
import math
import selectors
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING

from meshrl.common.base.errors import ConfigError, StateUnavailable
from meshrl.common.base.host.listen_addresses import (
    format_host,
    parse_listen_address,
    parse_socket_host,
)
from meshrl.common.base.host.settings import parse_advertised_host
from meshrl.common.weights.bulk.authenticators import BulkAuthenticator
from meshrl.common.weights.bulk.channel import PAUSE, UNLIMITED, RateLimits
from meshrl.common.weights.bulk.served_connection import (
    DISK_WRITE,
    KEY_LOOKUP,
    BackgroundTasks,
    BulkPortState,
    ServedConnection,
)
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.chunks.partial_file import ParkedUploads

if TYPE_CHECKING:
    from meshrl.common.mesh.process.host import Host

MAX_REQUEST_BYTES = 4 << 30  # in one request, at either end
IDLE_TIMEOUT_S = 60.0
COMMIT_TIMEOUT_S = 600.0  # for a disk to write the rest of a large file
POLL_S = 0.2  # between checks whether the thread should end
HANDSHAKE_TIMEOUT_S = 5.0  # for a client's proof: one round trip, on a busy host too
MAX_CONNECTIONS = 256
MAX_CONNECTIONS_PER_USER = 64  # of one process; each has one request at a time
MAX_UNAUTHENTICATED = (
    64  # unauthenticated connections; the oldest of the busiest address is closed for the next
)
ACCEPT_PAUSE_S = 0.5  # without accepting when no descriptors are left
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class BulkServer:
    """Server of a ChunkStore for users that `authenticator` admits.

    `bind` and `advertise` are those of the transport. Without `bind` there is no port, and only
    clients of this host can access the chunks.
    """

    def __init__(
        self,
        chunks: ChunkStore,
        host: Host,
        bind: str,
        advertise: str = "",
        *,
        authenticator: BulkAuthenticator,
        max_bytes: int = MAX_REQUEST_BYTES,
        rates: RateLimits = UNLIMITED,
        accepts_uploads: bool = True,
    ) -> None:
        """Start the server.

        Args:
            accepts_uploads: Users with permission may put chunks; else they can only get them.
        """
        chunks.directory.mkdir(parents=True, exist_ok=True)
        self._authenticator, self._parked_uploads = authenticator, ParkedUploads(time.monotonic)
        self._port_state = BulkPortState(
            chunks, self._parked_uploads, max_bytes, rates, takes=accepts_uploads
        )
        self._connections: dict[socket.socket, ServedConnection] = {}
        self._paused_until: dict[ServedConnection, float] = {}  # on the monotonic clock
        # "bulk_handshake": no valid handshake or proof. "bulk_keys": the key is unknown to
        # the mesh. "bulk_undecided": Redis did not answer. "bulk_crowd": closed for lack of slots.
        # "bulk_descriptors": no descriptor was left.
        self.rejection_counts: Counter[str] = Counter()
        self._closing = False
        if not bind:
            self.address = chunks.local_address
            return
        self._listener = _open_listener(bind)
        self._listener.setblocking(False)
        bound = self._listener.getsockname()
        self._endpoint = (
            f"tcp://{parse_advertised_host(advertise) or format_host(bound[0])}:{bound[1]}"
        )
        self.address = f"{self._endpoint}#{chunks.directory}"
        self._background_tasks: dict[int, BackgroundTasks[ServedConnection]] = {
            KEY_LOOKUP: BackgroundTasks(host, "bulk-keys"),
            DISK_WRITE: BackgroundTasks(host, "bulk-disk"),
        }
        self._selector = selectors.DefaultSelector()
        self._accept_resumes_at = (
            0.0  # on the monotonic clock; until then the listener is not polled
        )
        self._selector.register(self._listener, selectors.EVENT_READ)
        for errands in self._background_tasks.values():
            self._selector.register(errands.wakeup_reader, selectors.EVENT_READ, errands)
        self._thread = host.run_periodically(0.0, self._poll_once, "bulk")

    @property
    def connection_count(self) -> int:
        """Open connections, including unauthenticated ones."""
        return len(self._connections)

    @property
    def sent_bytes(self) -> int:
        """Bytes of chunks sent by this port."""
        return self._port_state.sent_bytes

    def close(self) -> None:
        """Stop the server within `POLL_S`; running transfers break off."""
        self._closing = True

    def _poll_once(self) -> bool:
        if self._closing:
            for client in list(self._connections.values()):
                self._close_connection(client)
            for errands in self._background_tasks.values():
                errands.close()
            self._selector.close()
            self._listener.close()
            self._parked_uploads.clear()
            return False
        # Until a paused connection continues, or the next check whether to end.
        paused_s = min(self._paused_until.values(), default=math.inf) - time.monotonic()
        for key, _ in self._selector.select(min(POLL_S, max(0.0, paused_s))):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, BackgroundTasks):
                for client, done in key.data.take_results():
                    if not client.is_closed:
                        client.task_result = done
                        self._advance(client)
            elif not key.data.is_closed:  # closed in this iteration
                self._advance(key.data)
        now = time.monotonic()
        for client in [c for c, until in self._paused_until.items() if until <= now]:
            del self._paused_until[client]
            self._advance(client)
        self._parked_uploads.discard_expired()
        for client in [c for c in self._connections.values() if now > c.expires_at]:
            self._close_connection(client)
        if 0.0 < self._accept_resumes_at <= now:
            self._accept_resumes_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        return True

    # ------------------------------------------------------------ coming and going

    def _accept(self) -> None:
        strangers = [c for c in self._connections.values() if not c.is_authenticated]
        try:
            accepted, (origin, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:  # else the client has closed again
                self.rejection_counts["bulk_descriptors"] += 1
                for stranger in strangers:  # free their descriptors
                    self._close_connection(stranger)
                # A waiting client would wake the thread continuously.
                self._selector.unregister(self._listener)
                self._accept_resumes_at = time.monotonic() + ACCEPT_PAUSE_S
            return
        if len(self._connections) - len(strangers) >= MAX_CONNECTIONS:
            self.rejection_counts["bulk_crowd"] += 1
            accepted.close()
            return
        if len(strangers) >= MAX_UNAUTHENTICATED:
            # Close the oldest of the address with most: frequent connects exclude no other host.
            [(busiest, _)] = Counter(c.origin for c in strangers).most_common(1)
            self.rejection_counts["bulk_crowd"] += 1
            self._close_connection(next(c for c in strangers if c.origin == busiest))
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = ServedConnection(
            accepted, origin, self._authenticator, self._endpoint, self._port_state
        )
        client.expires_at = time.monotonic() + HANDSHAKE_TIMEOUT_S
        self._connections[accepted] = client
        self._selector.register(accepted, selectors.EVENT_READ, client)

    def _advance(self, client: ServedConnection) -> None:
        known = client.is_authenticated
        try:
            step = next(client.io_steps)
        except (StopIteration, OSError):
            if not client.is_authenticated:
                undecided = isinstance(client.task_result, StateUnavailable)
                no_keys = (
                    "bulk_keys" if client.has_sent_key and not client.user else "bulk_handshake"
                )
                self.rejection_counts["bulk_undecided" if undecided else no_keys] += 1
            self._close_connection(client)
            return
        if client.is_authenticated:
            client.expires_at = time.monotonic() + IDLE_TIMEOUT_S
            if not known:
                own = sum(
                    c.is_authenticated and c.user == client.user for c in self._connections.values()
                )
                if own > MAX_CONNECTIONS_PER_USER:
                    self.rejection_counts["bulk_crowd"] += 1
                    self._close_connection(client)
                    return
        if step == DISK_WRITE:
            client.expires_at = time.monotonic() + COMMIT_TIMEOUT_S
        if step in self._background_tasks:
            self._background_tasks[step].submit(client, client.task)
        if step == PAUSE:
            self._paused_until[client] = time.monotonic() + client.pause_s
        self._wait_for(client, step)

    def _wait_for(self, client: ServedConnection, event: int) -> None:
        before, client.awaited_event = client.awaited_event, max(0, event)
        if before == client.awaited_event:
            return
        if not before:
            self._selector.register(client.socket, event, client)
        elif not client.awaited_event:
            self._selector.unregister(client.socket)
        else:
            self._selector.modify(client.socket, event, client)

    def _close_connection(self, client: ServedConnection) -> None:
        client.is_closed = True
        self._paused_until.pop(client, None)
        client.io_steps.close()
        if client.awaited_event:
            self._selector.unregister(client.socket)
        client.socket.close()
        del self._connections[client.socket]


def _open_listener(bind: str) -> socket.socket:
    interface, tried = parse_listen_address(bind, "mesh.bind")
    host, family = parse_socket_host(interface)
    last_error: OSError | None = None
    for port in tried:
        try:
            return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            last_error = error
    raise ConfigError(
        f"no port is free to serve chunks: {last_error}",
        where=f"mesh.bind = {bind!r}",
        fix="Set an address of this host, followed by * or a wider range of ports",
    )
