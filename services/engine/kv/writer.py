"""Writes chunks to a host's shelves: a thread, so that the engine copies and goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshrl.common.base.clock import Clock
from meshrl.common.generation.prefix_loading import ChunkBytes
from meshrl.services.engine.kv.chunk_files import ChunkHeader, StoredChunk
from meshrl.services.engine.kv.kv_tier import KVTier

MAX_QUEUED_BYTES = 256 << 20  # copies that are not written yet; more is not kept
DISK_RATE_BYTES_PER_S = 512e6  # of writes to a disk, which others read from


@dataclass(frozen=True)
class ChunkCopy:
    domain: str
    name: str
    header: ChunkHeader
    content: ChunkBytes


class ChunkWriter:
    """Puts copies on the first shelf that has room, and what goes from there on the next, until it
    is closed. `again(shelf)` tells the seconds that a byte takes to be loaded from a shelf; `done`
    is called with the name of each copy, wherever it came to lie, `failed` if the thread ends
    otherwise.
    """

    def __init__(
        self,
        tiers: Sequence[KVTier],
        clock: Clock,
        get_reload_s_per_byte: Callable[[KVTier], float],
        on_written: Callable[[str], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._tiers, self._clock, self._get_reload_s_per_byte = tiers, clock, get_reload_s_per_byte
        self._on_written, self._on_error = on_written, on_error
        self.written_bytes = {shelf.name: 0 for shelf in tiers}  # bytes
        self.last_error = (
            ""  # why the file system refused the last piece of work; empty: it did not
        )
        self.dropped_chunks = 0  # chunks for which there was no room, or no time
        self._queue: deque[Callable[[], None]] = deque()
        self._queued_bytes = 0
        self._throttled_until_s = 0.0  # when what was written is paid for, at the rate
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv writer", daemon=True)
        self._thread.start()

    def wait_for_room(self, size_bytes: int, timeout_s: float) -> bool:
        """Whether it takes so many bytes more, at least by then."""
        with self._condition:
            return self._condition.wait_for(
                lambda: self._queued_bytes + size_bytes <= MAX_QUEUED_BYTES, timeout_s
            )

    def add(self, copy: ChunkCopy) -> None:
        with self._condition:
            self._queued_bytes += copy.content.nbytes
            self._queue.append(lambda: self._process_copy(copy))
            self._condition.notify_all()

    def submit(self, work: Callable[[], None]) -> None:
        with self._condition:
            self._queue.append(work)
            self._condition.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all is written that was added; False: not in that time."""
        done = threading.Event()
        self.submit(done.set)
        return done.wait(timeout_s)

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._run_queue()
        except BaseException as error:
            self._on_error(error)

    def _run_queue(self) -> None:
        while True:
            with self._condition:
                while not (self._queue or self._closed):
                    self._condition.wait()
                if self._closed:
                    return
                work = self._queue.popleft()
            try:
                work()
                self.last_error = ""
            except OSError as error:  # others change the directories, and disks fail
                self.last_error = str(error)

    def _process_copy(self, copy: ChunkCopy) -> None:
        try:
            self._write(copy)
        finally:
            with self._condition:
                self._queued_bytes -= copy.content.nbytes
                self._condition.notify_all()
            self._on_written(copy.name)

    def _write(self, copy: ChunkCopy) -> None:
        for at, shelf in enumerate(self._tiers):
            below = self._tiers[at + 1] if at + 1 < len(self._tiers) else None
            again_s = self._get_reload_s_per_byte(below) if below is not None else 0.0

            def demote(found: StoredChunk, below: KVTier | None = below) -> None:
                if below is not None and found.header is not None:
                    self._throttle(below, found.bytes)
                    below.copy_from(found)

            self._throttle(shelf, copy.content.nbytes)
            if shelf.put(copy.domain, copy.name, copy.header, copy.content, again_s, demote):
                self.written_bytes[shelf.name] += copy.content.nbytes
                return
        self.dropped_chunks += 1

    def _throttle(self, tier: KVTier, size_bytes: int) -> None:
        """Waits until a write to a disk is within the rate."""
        if tier.name != "disk":
            return
        now = self._clock.monotonic()
        with self._condition:
            while self._throttled_until_s > now and not self._closed:
                self._condition.wait(self._throttled_until_s - now)
                now = self._clock.monotonic()
        self._throttled_until_s = (
            max(now, self._throttled_until_s) + size_bytes / DISK_RATE_BYTES_PER_S
        )
