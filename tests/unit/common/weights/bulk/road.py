"""A way between two ends of a connection on which things happen."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.load import scaled

LOOK_MS = 20  # between looks whether a road that stands goes on


class Road:
    """A way to a server, which cuts each connection once it has carried `most` bytes of it, both
    ways together. Once it has carried `stands_at` in all it carries nothing that the server sends,
    and with `both_ways` nothing at all. What the server sends is seen, and its byte at `spoils` is
    changed on each connection.
    """

    def __init__(self, port: int, most: int) -> None:
        self.most, self.stands_at, self.spoils = most, 1 << 40, -1
        self.both_ways = False
        self.seen = bytearray()
        self.carried = self.connections = self.spoiled = 0
        self.standing: list[socket.socket] = []
        self._port = port
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Road:
        self._listener = socket.create_server(("127.0.0.2", self._port))
        self._start(self._serve)
        return self

    def __exit__(self, *_: object) -> None:
        self.both_ways = False  # so that each thread sees the end
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in list(self.standing):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(scaled(20))
        self._listener.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                self.standing.append(near)
                self._start(self._carry, near)

    def _open(self, near: socket.socket, far: socket.socket) -> list[socket.socket]:
        """The ends from which it carries."""
        if self.carried < self.stands_at:
            return [near, far]
        return [] if self.both_ways else [near]

    def _carry(self, near: socket.socket) -> None:
        left, back = self.most, 0
        with suppress(OSError), near, socket.create_connection(("127.0.0.1", self._port)) as far:
            while left > 0:
                for source in _readable(self._open(near, far)):
                    content = source.recv(min(left, 1 << 16)) if left else b""
                    if not content:
                        left = 0
                        break
                    left -= len(content)
                    if source is far:
                        if 0 <= (at := self.spoils - back) < len(content):
                            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
                            self.spoiled += 1
                        back += len(content)
                        self.seen += content
                    self.carried += len(content)
                    (far if source is near else near).sendall(content)
        self.standing.remove(near)


def _readable(ends: list[socket.socket]) -> list[socket.socket]:
    """Those of which something can be read, once there is one or the road may have changed; of any
    number, unlike `select`'s.
    """
    poll, by_number = select.poll(), {end.fileno(): end for end in ends}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(LOOK_MS)]
