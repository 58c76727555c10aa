"""Writer thread of a host's KV tiers, so that the engine only copies and continues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshrl.common.base.clock import Clock
from meshrl.common.generation.prefix_loading import ChunkBytes
from meshrl.services.engine.kv.chunk_files import ChunkHeader, StoredChunk
from meshrl.services.engine.kv.kv_tier import KVTier

MAX_QUEUED_BYTES = 256 << 20  # copies that are not written yet; more are dropped
DISK_RATE_BYTES_PER_S = 512e6  # limit of disk writes, because other processes read from the disk


@dataclass(frozen=True)
class ChunkCopy:
    domain: str
    name: str
    header: ChunkHeader
    content: ChunkBytes


class ChunkWriter:
    """Writer of copies to the first tier that has room, and of evicted chunks to the next.

    It runs until it is closed. `get_reload_s_per_byte(tier)` returns the seconds that
    loading a byte from a tier takes. `on_written` is called with the name of each copy, wherever it
    was stored; `on_error` if the thread ends otherwise.
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
        self.written_bytes = {shelf.name: 0 for shelf in tiers}  # by tier
        self.last_error = ""  # error of the last write; empty: it succeeded
        self.dropped_chunks = 0  # chunks without room or time
        self._queue: deque[Callable[[], None]] = deque()
        self._queued_bytes = 0
        self._throttled_until_s = 0.0  # when the rate limit allows the next write
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv writer", daemon=True)
        self._thread.start()

    def wait_for_room(self, size_bytes: int, timeout_s: float) -> bool:
        """Wait until the queue takes `size_bytes` more; return False on timeout."""
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
        """Wait until all queued copies are written; return False on timeout."""
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
            except OSError as error:  # other processes change the directories, and disks fail
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
        """Wait until a write to a disk is within the rate."""
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
