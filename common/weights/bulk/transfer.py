"""A transfer of a file part by part, which goes on where it was when a connection breaks. Blocking;
used in a thread.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshrl.common.api.transfer.bulk import WEIGHTS
from meshrl.common.base.digest import digest_of_stream
from meshrl.common.base.errors import BadMessage, DeadlineExceeded, NotFound, PeerLost
from meshrl.common.weights.bulk.session import HAS, POSITION, REST, BulkSession
from meshrl.common.weights.chunks.partial import Writer

T = TypeVar("T")
PART_BYTES = 64 << 20  # in one request
BREAKS = 5  # of connections in a row, with nothing moved, that end it
PAUSE_S = 0.05  # before a connection that broke is made again; twice as long after each in a row
KEPT_S = 20.0  # unused; a server waits three times as long for the next request
MOST = 16  # that are unused, of one process


class Kept:
    """The connections of one process, by whom they reach, which are kept between two requests: a
    proof and a slow start cost several round trips each. Used in threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[
            tuple[float, str, BulkSession]
        ] = []  # since when, and to whom; oldest first

    def over(
        self,
        key: str,
        connect: Callable[[], BulkSession],
        work: Callable[[BulkSession], T],
        given_up: Callable[[], bool] = lambda: False,
    ) -> T:
        """Does `work` over a connection that is free, or over one of its own, which is kept if the
        work was answered to its end. PeerLost, NotFound.
        """
        if (session := self._taken(key)) is not None:
            try:
                return self._done(key, session, work)
            except PeerLost:
                if given_up():
                    raise  # else it was closed at the other end meanwhile
        return self._done(key, connect().open(), work)

    def _done(self, key: str, session: BulkSession, work: Callable[[BulkSession], T]) -> T:
        try:
            result = work(session)
        except BaseException as error:
            if isinstance(error, NotFound):
                self._give(key, session)
            else:
                session.close()
            raise
        self._give(key, session)
        return result

    def _taken(self, key: str) -> BulkSession | None:
        self.close_idle()
        with self._lock:
            for at in reversed(range(len(self._idle))):
                if self._idle[at][1] == key:
                    return self._idle.pop(at)[-1]
        return None

    def _give(self, key: str, session: BulkSession) -> None:
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


class Transfer:
    """One file on its way. `connect` makes a session, not yet entered."""

    def __init__(
        self,
        connect: Callable[[], BulkSession],
        part_bytes: int = PART_BYTES,
        kept: Kept | None = None,
        key: str = "",
    ) -> None:
        """`kept`: it comes over one of these connections, whom `key` names, and does not go on when
        that breaks.
        """
        self._connect, self._part_bytes, self._kept, self._key = connect, part_bytes, kept, key
        self._session: BulkSession | None = None
        self._stopped = threading.Event()
        self._position = 0

    def stop(self) -> None:
        """Ends the transfer, from another thread: PeerLost is raised there."""
        self._stopped.set()
        if (session := self._session) is not None:
            session.break_off()

    def fetch(self, writer: Writer, space: str = WEIGHTS, whole: int | None = None) -> None:
        """Adds what is lacking of a chunk, of `whole` bytes if that is known: Damaged when the
        source has another size of it. NotFound, PeerLost, StorageFull, DeadlineExceeded when
        nothing comes for too long.
        """
        began = writer.position

        def go_on(session: BulkSession) -> None:
            size = whole
            while size is None or writer.position < size:  # the next server may have less of it
                at, most = writer.position, self._part_bytes
                most = most if whole is None else min(most, whole - at)
                size = session.get(writer.digest, at, most, writer.write, whole, space)
                self._position = writer.position

        self._over_breaks(go_on, lambda: self._stopped.is_set() or writer.position != began)

    def send(self, path: Path) -> str:
        """Puts a file, and returns its digest. StorageFull, PeerLost, BadMessage if it changes."""
        with path.open("rb") as file:
            digest = digest_of_stream(file)
            size = file.tell()

            def go_on(session: BulkSession) -> None:
                if session.ask(HAS, digest) == b"\x01":
                    return
                (at,) = POSITION.unpack(session.ask(REST, digest))
                if at > size:
                    raise BadMessage(f"{at} bytes are there of {size}", where=str(path))
                while True:
                    length = min(self._part_bytes, size - at)
                    session.put(digest, file, at, length, size)
                    at += length
                    self._position = max(self._position, at)
                    if at == size:
                        return

            self._over_breaks(go_on)
        return digest

    def _over_breaks(
        self, work: Callable[[BulkSession], None], given_up: Callable[[], bool] = lambda: False
    ) -> None:
        breaks = 0
        while True:
            before = self._position
            try:
                if self._kept is not None:
                    about = self._key, self._connect, functools.partial(self._done, work)
                    return self._kept.over(*about, given_up)
                with self._connect() as session:
                    return self._done(work, session)
            except (PeerLost, DeadlineExceeded):
                breaks = breaks + 1 if self._position == before else 0
                if self._kept or breaks == BREAKS or self._stopped.wait(PAUSE_S * 2**breaks):
                    raise

    def _done(self, work: Callable[[BulkSession], None], session: BulkSession) -> None:
        self._session = session
        try:
            if not self._stopped.is_set():
                work(session)
        finally:
            self._session = None
        if self._stopped.is_set():  # the session may be broken off
            raise PeerLost("a transfer was broken off")
