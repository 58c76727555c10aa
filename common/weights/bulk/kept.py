"""Connections to bulk ports that are kept between two requests, because the next chunk is of the
same host: a proof and a slow start cost several round trips each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from common.base.errors import NotFound, PeerLost
from common.weights.bulk.session import BulkSession
from common.weights.chunks.partial import Writer

KEPT_S = 20.0  # unused; a server waits three times as long for the next request
MOST = 16  # that are unused, of one process


class Kept:
    """The connections of one process, by whom they reach. Used in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[
            tuple[float, str, BulkSession]
        ] = []  # since when, and to whom; oldest first

    def take(self, key: str) -> BulkSession | None:
        """One that nobody uses: the caller's until it gives it back, or closes it."""
        self.close_idle()
        with self._lock:
            for at in reversed(range(len(self._idle))):
                if self._idle[at][1] == key:
                    return self._idle.pop(at)[-1]
        return None

    def give(self, key: str, session: BulkSession) -> None:
        """One is free whose last request was answered to its end."""
        with self._lock:
            self._idle.append((time.monotonic(), key, session))
            oldest = self._idle.pop(0) if len(self._idle) > MOST else None
        if oldest is not None:
            oldest[-1].close()

    def close_idle(self, longer_than_s: float = KEPT_S) -> None:
        """Closes those that were unused for so long."""
        before = time.monotonic() - longer_than_s
        with self._lock:
            old = [kept for kept in self._idle if kept[0] <= before]
            self._idle = [kept for kept in self._idle if kept[0] > before]
        for _, _, session in old:
            session.close()


class Arrival:
    """One chunk on its way over a kept connection: what one source sends, from where `writer` is,
    up to its `size`. Blocking; used in a thread.
    """

    def __init__(
        self, kept: Kept, key: str, connect: Callable[[], BulkSession], writer: Writer, size: int
    ) -> None:
        self._kept, self._key, self._connect = kept, key, connect
        self._writer, self._size = writer, size
        self._session: BulkSession | None = None
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends it, from another thread: PeerLost is raised there."""
        self._stopped.set()
        if (session := self._session) is not None:
            session.break_off()

    def run(self, part_bytes: int) -> None:
        """Adds all that is lacking. NotFound, Damaged when the source has another size of it,
        PeerLost, StorageFull, DeadlineExceeded when nothing comes for too long.
        """
        began, session = self._writer.position, self._kept.take(self._key)
        if session is not None:
            try:
                return self._over(session, part_bytes)
            except PeerLost:
                if self._stopped.is_set() or self._writer.position != began:
                    raise  # else it was closed at the other end meanwhile
        self._over(self._connect().open(), part_bytes)

    def _over(self, session: BulkSession, part_bytes: int) -> None:
        self._session, clean, writer = session, False, self._writer
        try:
            if self._stopped.is_set():
                raise PeerLost("a transfer was broken off")
            while (left := self._size - writer.position) > 0:
                most = min(part_bytes, left)
                session.get(writer.digest, writer.position, most, writer.write, self._size)
            clean = True
        except NotFound:
            clean = True
            raise
        finally:
            self._session = None
            if clean and not self._stopped.is_set():
                self._kept.give(self._key, session)
            else:
                session.close()
