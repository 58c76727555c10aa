"""File that arrives in pieces, stored beside its destination until it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshrl.common.base.digest import Hasher
from meshrl.common.base.errors import CorruptData, Refused
from meshrl.common.weights.chunks.chunk_store import ChunkStore, ScratchFile

PARKED_TIMEOUT_S = 60.0  # for a client whose connection broke to continue
MAX_PARKED = 16  # the oldest one is dropped first


class PartialFile:
    """Received part of the bytes of `digest`. Leaving the context discards uncommitted bytes.

    A thread may still write after its transfer has ended or another transfer has continued. Such
    writes are rejected (`take_writer`).
    """

    def __init__(
        self, digest: str, open_scratch: Callable[[], ScratchFile], chunks: ChunkStore | None = None
    ) -> None:
        """Create the partial file.

        Args:
            open_scratch: Opens the scratch file when the first bytes arrive.
            chunks: Store of the chunk, if any.
        """
        self.digest = digest
        self.received_bytes = 0  # bytes so far
        self._open_scratch, self._chunks = open_scratch, chunks
        self._scratch: ScratchFile | None = None
        self._hasher = Hasher()
        self._is_discarded = self._is_committed = False
        self._current_writer: PartialFileWriter | None = None
        self._lock = threading.RLock()

    @classmethod
    def for_file(cls, path: Path, digest: str) -> PartialFile:
        """Create a partial file for any path."""
        return cls(digest, lambda: ScratchFile(path, lambda _: None))

    @classmethod
    def for_chunk(cls, chunks: ChunkStore, digest: str, *, durable: bool = True) -> PartialFile:
        """Create a partial chunk of a store; a cached one need not be durable."""
        return cls(digest, lambda: chunks.open_scratch(digest, durable=durable), chunks)

    @property
    def is_valid(self) -> bool:
        """True if the received bytes have the digest."""
        return bool(self._hasher.hexdigest() == self.digest)

    def take_writer(self) -> PartialFileWriter:
        """Return the only writer from now on; earlier writers are rejected."""
        self._current_writer = writer = PartialFileWriter(self)
        return writer

    def write(self, content: bytes | memoryview) -> None:
        """Append the next bytes. The caller has exclusive use. StorageFull: the disk is full."""
        with self._lock:
            self._require_scratch().write(content)
            self._hasher.update(content)
            self.received_bytes += len(content)

    def commit(self) -> None:
        """Make the file durable at its destination, replacing any file there, once.

        Raises:
            StorageFull: The disk is full.
        """
        with self._lock:
            if not self._is_committed:
                scratch = self._require_scratch()
                scratch.commit()
                if self._chunks is not None and self.is_valid:
                    self._chunks.record_verified(self.digest)
                scratch.unlock()
            self._is_committed = True

    def reset(self) -> None:
        """Discard the bytes received so far."""
        with self._lock:
            if self._scratch is not None:
                self._scratch.discard()
            self._scratch, self._hasher, self.received_bytes = None, Hasher(), 0

    def discard(self) -> None:
        """Discard the bytes unless they were committed, and accept no more."""
        with self._lock:
            self.reset()
            self._is_discarded = True

    def _require_scratch(self) -> ScratchFile:
        if self._is_discarded:
            raise Refused("no process waits for this transfer")
        if self._scratch is None:
            self._scratch = self._open_scratch()
        return self._scratch

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class PartialFileWriter:
    """One transfer's exclusive right to write to a `PartialFile`.

    It serves a thread that may outlive its transfer: after its release, or once another writer
    exists, every call raises Refused.
    """

    def __init__(self, partial: PartialFile) -> None:
        self._partial, self.digest = partial, partial.digest

    @property
    def received_bytes(self) -> int:
        """Bytes received so far."""
        with self._require_ownership():
            return self._partial.received_bytes

    def write(self, content: bytes | memoryview) -> None:
        """Append the next bytes. StorageFull: the disk is full."""
        with self._require_ownership():
            self._partial.write(content)

    def verify_and_commit(self, where: str = "") -> None:
        """Make the file durable at its destination, once.

        Raises:
            CorruptData: The bytes do not match the digest; they are discarded.
            StorageFull: The disk is full.
        """
        with self._require_ownership():
            if not self._partial.is_valid:
                self._partial.reset()
                raise CorruptData(f"chunk {self.digest} arrived corrupt", where=where)
            self._partial.commit()

    def release(self) -> None:
        """End the right to write without waiting; the write in progress completes."""
        if self._partial._current_writer is self:
            self._partial._current_writer = None

    @contextmanager
    def _require_ownership(self) -> Iterator[None]:
        with self._partial._lock:
            if self._partial._current_writer is not self:
                raise Refused("no process waits for this transfer")
            yield

    def __enter__(self) -> PartialFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class ParkedUploads:
    """Partial uploads of broken connections. The owner calls `discard_expired` regularly."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Create an empty collection.

        Args:
            monotonic: Monotonic clock in seconds.
        """
        self._monotonic = monotonic
        # Oldest first: expiry time, user, upload.
        self._uploads: list[tuple[float, str, PartialFile]] = []

    def park(self, user: str, partial: PartialFile) -> None:
        """Retain a client's partial upload for `PARKED_TIMEOUT_S`."""
        if len(self._uploads) == MAX_PARKED:
            self._uploads.pop(0)[-1].discard()
        self._uploads.append((self._monotonic() + PARKED_TIMEOUT_S, user, partial))

    def take(self, user: str, digest: str) -> PartialFile | None:
        """Remove and return the user's longest partial upload of this digest."""
        found = [one for _, whose, one in self._uploads if (whose, one.digest) == (user, digest)]
        if not found:
            return None
        longest = max(found, key=lambda one: one.received_bytes)
        self._uploads = [upload for upload in self._uploads if upload[-1] is not longest]
        return longest

    def discard_expired(self) -> None:
        """Discard uploads that have expired."""
        while self._uploads and self._uploads[0][0] < self._monotonic():
            self._uploads.pop(0)[-1].discard()

    def clear(self) -> None:
        """Discard all uploads."""
        while self._uploads:
            self._uploads.pop()[-1].discard()
