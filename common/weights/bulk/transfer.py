"""A transfer of a file part by part, which goes on where it was when a connection breaks. Blocking;
used in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from common.api.transfer.bulk import WEIGHTS
from common.base.digest import digest_of_stream
from common.base.errors import BadMessage, DeadlineExceeded, PeerLost
from common.weights.bulk.session import HAS, POSITION, REST, BulkSession
from common.weights.chunks.partial import Writer

PART_BYTES = 64 << 20  # in one request
BREAKS = 5  # of connections in a row, with nothing moved, that end it
PAUSE_S = 0.05  # before a connection that broke is made again; twice as long after each in a row


class Transfer:
    """One file on its way. `connect` makes a session, not yet entered."""

    def __init__(self, connect: Callable[[], BulkSession], part_bytes: int = PART_BYTES) -> None:
        self._connect, self._part_bytes = connect, part_bytes
        self._session: BulkSession | None = None
        self._stopped = threading.Event()
        self._position = 0

    def stop(self) -> None:
        """Ends the transfer, from another thread: PeerLost is raised there."""
        self._stopped.set()
        if self._session is not None:
            self._session.break_off()

    def fetch(self, writer: Writer, space: str = WEIGHTS) -> None:
        """Adds what is lacking of a chunk. NotFound, PeerLost, StorageFull."""

        def go_on(session: BulkSession) -> None:
            size = -1
            while size < 0 or writer.position < size:  # the next server may have less of it
                part = writer.position, self._part_bytes, writer.write
                size = session.get(writer.digest, *part, space=space)
                self._position = writer.position

        self._over_breaks(go_on)

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

    def _over_breaks(self, work: Callable[[BulkSession], None]) -> None:
        breaks = 0
        while True:
            before = self._position
            try:
                with self._connect() as self._session:
                    if self._stopped.is_set():
                        raise PeerLost("a transfer was broken off")
                    work(self._session)
                    return
            except (PeerLost, DeadlineExceeded):
                breaks = breaks + 1 if self._position == before else 0
                if breaks == BREAKS or self._stopped.wait(PAUSE_S * 2**breaks):
                    raise
