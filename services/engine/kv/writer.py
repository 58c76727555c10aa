"""Writes chunks to a host's shelves: a thread, so that the engine copies and goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshrl.common.base.clock import Clock
from meshrl.common.generation.loading import Content
from meshrl.services.engine.kv.chunk_files import ChunkHead, FoundChunk
from meshrl.services.engine.kv.shelf import KVTier

WAITING_BYTES = 256 << 20  # copies that are not written yet; more is not kept
DISK_BYTES_PER_S = 512e6  # of writes to a disk, which others read from


@dataclass(frozen=True)
class Copy:
    domain: str
    name: str
    head: ChunkHead
    content: Content


class ChunkWriter:
    """Puts copies on the first shelf that has room, and what goes from there on the next, until it
    is closed. `again(shelf)` tells the seconds that a byte takes to be loaded from a shelf; `done`
    is called with the name of each copy, wherever it came to lie, `failed` if the thread ends
    otherwise.
    """

    def __init__(
        self,
        shelves: Sequence[KVTier],
        clock: Clock,
        again: Callable[[KVTier], float],
        done: Callable[[str], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._shelves, self._clock, self._again = shelves, clock, again
        self._done, self._failed = done, failed
        self.written = {shelf.name: 0 for shelf in shelves}  # bytes
        self.trouble = ""  # why the file system refused the last piece of work; empty: it did not
        self.not_kept = 0  # chunks for which there was no room, or no time
        self._waiting: deque[Callable[[], None]] = deque()
        self._bytes = 0
        self._paid_s = 0.0  # when what was written is paid for, at the rate
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv writer", daemon=True)
        self._thread.start()

    def room(self, size: int, within_s: float) -> bool:
        """Whether it takes so many bytes more, at least by then."""
        with self._condition:
            return self._condition.wait_for(lambda: self._bytes + size <= WAITING_BYTES, within_s)

    def add(self, copy: Copy) -> None:
        with self._condition:
            self._bytes += copy.content.nbytes
            self._waiting.append(lambda: self._take(copy))
            self._condition.notify_all()

    def do(self, work: Callable[[], None]) -> None:
        with self._condition:
            self._waiting.append(work)
            self._condition.notify_all()

    def flush(self, within_s: float) -> bool:
        """Waits until all is written that was added; False: not in that time."""
        done = threading.Event()
        self.do(done.set)
        return done.wait(within_s)

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._failed(error)

    def _work(self) -> None:
        while True:
            with self._condition:
                while not (self._waiting or self._closed):
                    self._condition.wait()
                if self._closed:
                    return
                work = self._waiting.popleft()
            try:
                work()
                self.trouble = ""
            except OSError as error:  # others change the directories, and disks fail
                self.trouble = str(error)

    def _take(self, copy: Copy) -> None:
        try:
            self._write(copy)
        finally:
            with self._condition:
                self._bytes -= copy.content.nbytes
                self._condition.notify_all()
            self._done(copy.name)

    def _write(self, copy: Copy) -> None:
        for at, shelf in enumerate(self._shelves):
            below = self._shelves[at + 1] if at + 1 < len(self._shelves) else None
            again_s = self._again(below) if below is not None else 0.0

            def demote(found: FoundChunk, below: KVTier | None = below) -> None:
                if below is not None and found.head is not None:
                    self._pay(below, found.bytes)
                    below.take_in(found)

            self._pay(shelf, copy.content.nbytes)
            if shelf.put(copy.domain, copy.name, copy.head, copy.content, again_s, demote):
                self.written[shelf.name] += copy.content.nbytes
                return
        self.not_kept += 1

    def _pay(self, shelf: KVTier, size: int) -> None:
        """Waits until a write to a disk is within the rate."""
        if shelf.name != "disk":
            return
        now = self._clock.monotonic()
        with self._condition:
            while self._paid_s > now and not self._closed:
                self._condition.wait(self._paid_s - now)
                now = self._clock.monotonic()
        self._paid_s = max(now, self._paid_s) + size / DISK_BYTES_PER_S
