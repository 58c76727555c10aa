"""What a bulk port's thread, which waits for nobody, has done by others: to ask whose a key is may
take Redis a second, and to make a large file durable takes a disk several.
"""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from common.base.errors import MeshError

if TYPE_CHECKING:
    from common.mesh.process.host import Host

TURN_S = 0.5  # how often a thread looks whether it should end

K = TypeVar("K")
Errand = Callable[[], object]


class BulkTasks(Generic[K]):
    """One thread, which starts with the first errand. `woken` becomes readable when `done` has
    something to tell. `K`: who an errand is for.
    """

    def __init__(self, host: Host, name: str) -> None:
        self._host, self._name = host, name
        self.woken, self._wakes = socket.socketpair()
        for end in (self.woken, self._wakes):
            end.setblocking(False)
        self._todo: queue.SimpleQueue[tuple[K, Errand]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[K, object]] = queue.SimpleQueue()
        self._started = self._closing = False

    def run(self, client: K, errand: Errand) -> None:
        """Has it done after those before it."""
        self._todo.put((client, errand))
        if not self._started:
            self._started = True
            self._thread = self._host.every(0.0, self._turn, self._name)

    def done(self) -> list[tuple[K, object]]:
        """For whom something was done, and what it returned, or its MeshError."""
        with suppress(BlockingIOError):
            self.woken.recv(4096)
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._done.get_nowait())
        return found

    def close(self) -> None:
        """Ends the thread at its next look."""
        self._closing = True
        if not self._started:
            self._shut()

    def _shut(self) -> None:
        self.woken.close()
        self._wakes.close()

    def _turn(self) -> bool:
        if self._closing:
            self._shut()
            return False
        with suppress(queue.Empty):
            client, errand = self._todo.get(timeout=TURN_S)
            try:
                self._done.put((client, errand()))
            except Exception as error:  # its client is not to wait for an answer for ever
                typed = error if isinstance(error, MeshError) else MeshError(repr(error))
                self._done.put((client, typed))
            with suppress(BlockingIOError):  # the last one is still to be heard
                self._wakes.send(b"\0")
        return True
