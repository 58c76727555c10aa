"""TCP proxy that cuts, stalls and corrupts connections."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.load import scaled

POLL_MS = 20  # between checks for the end of a stall


class FaultyProxy:
    """Proxy to a local server. It closes each connection after `max_bytes` bytes of both
    directions. Once it has carried `stall_at_bytes` in all it forwards nothing from the server,
    and nothing at all if `stalls_both_directions`. It records the bytes of the server and flips
    a bit of the byte at `corrupt_at` on each connection.
    """

    def __init__(self, port: int, max_bytes: int) -> None:
        self.max_bytes, self.stall_at_bytes, self.corrupt_at = max_bytes, 1 << 40, -1
        self.stalls_both_directions = False
        self.server_bytes = bytearray()
        self.carried_bytes = self.connections = self.corrupted_count = 0
        self.open_connections: list[socket.socket] = []
        self._port = port
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> FaultyProxy:
        self._listener = socket.create_server(("127.0.0.2", self._port))
        self._start(self._accept_connections)
        return self

    def __exit__(self, *_: object) -> None:
        self.stalls_both_directions = False  # so that each thread sees the end
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in list(self.open_connections):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(scaled(20))
        self._listener.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept_connections(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                self.open_connections.append(near)
                self._start(self._forward, near)

    def _select_sources(self, near: socket.socket, far: socket.socket) -> list[socket.socket]:
        """Return the ends that it reads from."""
        if self.carried_bytes < self.stall_at_bytes:
            return [near, far]
        return [] if self.stalls_both_directions else [near]

    def _forward(self, near: socket.socket) -> None:
        remaining_bytes, returned_bytes = self.max_bytes, 0
        with suppress(OSError), near, socket.create_connection(("127.0.0.1", self._port)) as far:
            while remaining_bytes > 0:
                for source in _readable(self._select_sources(near, far)):
                    content = source.recv(min(remaining_bytes, 1 << 16)) if remaining_bytes else b""
                    if not content:
                        remaining_bytes = 0
                        break
                    remaining_bytes -= len(content)
                    if source is far:
                        if 0 <= (at := self.corrupt_at - returned_bytes) < len(content):
                            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
                            self.corrupted_count += 1
                        returned_bytes += len(content)
                        self.server_bytes += content
                    self.carried_bytes += len(content)
                    (far if source is near else near).sendall(content)
        self.open_connections.remove(near)


def _readable(ends: list[socket.socket]) -> list[socket.socket]:
    """Return the ends that are readable; after POLL_MS at the latest. Takes descriptors of any
    number, unlike `select`.
    """
    poll, by_descriptor = select.poll(), {end.fileno(): end for end in ends}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(POLL_MS)]
