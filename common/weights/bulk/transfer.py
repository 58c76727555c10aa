"""Transfer of a file in parts that continues after a broken connection. Blocking; run in a
thread.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshrl.common.api.transfer.bulk_permissions import WEIGHTS
from meshrl.common.base.digest import compute_stream_digest
from meshrl.common.base.errors import BadMessage, DeadlineExceeded, NotFound, PeerLost
from meshrl.common.weights.bulk.session import HAS, PARTIAL_SIZE, POSITION, BulkSession
from meshrl.common.weights.chunks.partial_file import PartialFileWriter

T = TypeVar("T")
MAX_PART_BYTES = 64 << 20  # in one request
MAX_BREAKS = 5  # broken connections in a row without progress that end a transfer
RETRY_PAUSE_S = 0.05  # before a reconnection, doubled after each consecutive failure
IDLE_TIMEOUT_S = 20.0  # a server waits three times as long for the next request
MAX_IDLE_CONNECTIONS = 16  # of one process


class ConnectionPool:
    """Pooled connections of one process by peer, for use in threads.

    A new connection costs several round trips for its handshake and its slow start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle_sessions: list[
            tuple[float, str, BulkSession]
        ] = []  # unused since, peer; oldest first

    def run_over(
        self,
        key: str,
        connect: Callable[[], BulkSession],
        work: Callable[[BulkSession], T],
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> T:
        """Run `work` over an idle connection or a new one; return the connection if it was
        answered.

        PeerLost, NotFound.
        """
        if (session := self._take_idle(key)) is not None:
            try:
                return self._run_and_return(key, session, work)
            except PeerLost:
                if is_abandoned():
                    raise  # else the peer closed the idle connection
        return self._run_and_return(key, connect().open(), work)

    def _run_and_return(
        self, key: str, session: BulkSession, work: Callable[[BulkSession], T]
    ) -> T:
        try:
            result = work(session)
        except BaseException as error:
            if isinstance(error, NotFound):
                self._return_session(key, session)
            else:
                session.close()
            raise
        self._return_session(key, session)
        return result

    def _take_idle(self, key: str) -> BulkSession | None:
        self.close_idle()
        with self._lock:
            for at in reversed(range(len(self._idle_sessions))):
                if self._idle_sessions[at][1] == key:
                    return self._idle_sessions.pop(at)[-1]
        return None

    def _return_session(self, key: str, session: BulkSession) -> None:
        with self._lock:
            self._idle_sessions.append((time.monotonic(), key, session))
            oldest = (
                self._idle_sessions.pop(0)
                if len(self._idle_sessions) > MAX_IDLE_CONNECTIONS
                else None
            )
        if oldest is not None:
            oldest[-1].close()

    def close_idle(self, min_idle_s: float = IDLE_TIMEOUT_S) -> None:
        """Close connections that were unused for `min_idle_s`."""
        before = time.monotonic() - min_idle_s
        with self._lock:
            old = [entry for entry in self._idle_sessions if entry[0] <= before]
            self._idle_sessions = [entry for entry in self._idle_sessions if entry[0] > before]
        for _, _, session in old:
            session.close()


class FileTransfer:
    """Transfer of one file; `connect` creates an unopened session."""

    def __init__(
        self,
        connect: Callable[[], BulkSession],
        part_bytes: int = MAX_PART_BYTES,
        pool: ConnectionPool | None = None,
        peer_key: str = "",
    ) -> None:
        """Create the transfer.

        Args:
            pool: Use its connections to `peer_key`; the transfer then does not reconnect.
        """
        self._connect, self._part_bytes, self._pool, self._peer_key = (
            connect,
            part_bytes,
            pool,
            peer_key,
        )
        self._session: BulkSession | None = None
        self._stopped = threading.Event()
        self._position = 0

    def stop(self) -> None:
        """Stop the transfer from another thread, where it raises PeerLost."""
        self._stopped.set()
        if (session := self._session) is not None:
            session.abort()

    def fetch(
        self, writer: PartialFileWriter, space: str = WEIGHTS, expected_bytes: int | None = None
    ) -> None:
        """Fetch the missing bytes of a chunk.

        Args:
            expected_bytes: Size of the chunk if known; CorruptData if the source has another one.
        Raises:
            NotFound, PeerLost, StorageFull: The transfer failed.
            DeadlineExceeded: No byte moved for too long.
        """
        began = writer.received_bytes

        def go_on(session: BulkSession) -> None:
            size = expected_bytes
            # the next server may have less of it
            while size is None or writer.received_bytes < size:
                at, most = writer.received_bytes, self._part_bytes
                most = most if expected_bytes is None else min(most, expected_bytes - at)
                size = session.fetch_range(
                    writer.digest, at, most, writer.write, expected_bytes, space
                )
                self._position = writer.received_bytes

        self._run_with_reconnects(
            go_on, lambda: self._stopped.is_set() or writer.received_bytes != began
        )

    def send(self, path: Path) -> str:
        """Send a file and return its digest. StorageFull, PeerLost; BadMessage: the file
        changed.
        """
        with path.open("rb") as file:
            digest = compute_stream_digest(file)
            size = file.tell()

            def go_on(session: BulkSession) -> None:
                if session.request(HAS, digest) == b"\x01":
                    return
                (at,) = POSITION.unpack(session.request(PARTIAL_SIZE, digest))
                if at > size:
                    raise BadMessage(
                        f"the receiver has {at} bytes of a file of {size}", where=str(path)
                    )
                while True:
                    length = min(self._part_bytes, size - at)
                    session.put_range(digest, file, at, length, size)
                    at += length
                    self._position = max(self._position, at)
                    if at == size:
                        return

            self._run_with_reconnects(go_on)
        return digest

    def _run_with_reconnects(
        self, work: Callable[[BulkSession], None], is_abandoned: Callable[[], bool] = lambda: False
    ) -> None:
        breaks = 0
        while True:
            before = self._position
            try:
                if self._pool is not None:
                    about = (
                        self._peer_key,
                        self._connect,
                        functools.partial(self._run_in_session, work),
                    )
                    return self._pool.run_over(*about, is_abandoned)
                with self._connect() as session:
                    return self._run_in_session(work, session)
            except (PeerLost, DeadlineExceeded):
                breaks = breaks + 1 if self._position == before else 0
                if (
                    self._pool
                    or breaks == MAX_BREAKS
                    or self._stopped.wait(RETRY_PAUSE_S * 2**breaks)
                ):
                    raise

    def _run_in_session(self, work: Callable[[BulkSession], None], session: BulkSession) -> None:
        self._session = session
        try:
            if not self._stopped.is_set():
                work(session)
        finally:
            self._session = None
        if self._stopped.is_set():  # the session may be broken
            raise PeerLost("a transfer was cancelled")
