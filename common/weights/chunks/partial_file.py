"""A file that arrives in pieces: what is there so far, beside the place that it is for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshrl.common.base.digest import Hasher
from meshrl.common.base.errors import CorruptData, Refused
from meshrl.common.weights.chunks.chunk_store import ChunkStore, ScratchFile

PARKED_TIMEOUT_S = 60.0  # how long a client whose connection broke has to go on
MAX_PARKED = 16  # of them at most; the oldest makes room


class PartialFile:
    """What has arrived of the bytes of `digest`. To leave it is to forget what was not committed.

    A thread writes while whoever began it may leave, or another one may go on: what is written
    after that is refused (`writer`).
    """

    def __init__(
        self, digest: str, open_scratch: Callable[[], ScratchFile], chunks: ChunkStore | None = None
    ) -> None:
        """`open_scratch`: makes room, when the first bytes are there. `chunks`: the store whose
        chunk it is.
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
        """For a file of any name."""
        return cls(digest, lambda: ScratchFile(path, lambda _: None))

    @classmethod
    def for_chunk(cls, chunks: ChunkStore, digest: str, *, durable: bool = True) -> PartialFile:
        """For a chunk of a store; of a cache it need not be durable."""
        return cls(digest, lambda: chunks.open_scratch(digest, durable=durable), chunks)

    @property
    def is_valid(self) -> bool:
        """Whether what has arrived is all there is, and nothing else."""
        return bool(self._hasher.hexdigest() == self.digest)

    def take_writer(self) -> PartialFileWriter:
        """Who alone may write from now on, until it is left: whoever did before is refused."""
        self._current_writer = made = PartialFileWriter(self)
        return made

    def write(self, content: bytes | memoryview) -> None:
        """Appends the bytes that come next, by whoever has it for itself. StorageFull."""
        with self._lock:
            self._require_scratch().write(content)
            self._hasher.update(content)
            self.received_bytes += len(content)

    def commit(self) -> None:
        """Makes it durable in its place, over what is there, once. StorageFull."""
        with self._lock:
            if not self._is_committed:
                self._require_scratch().commit()
                if self._chunks is not None and self.is_valid:
                    self._chunks.record_verified(self.digest)
            self._is_committed = True

    def reset(self) -> None:
        """Forgets what has arrived so far."""
        with self._lock:
            if self._scratch is not None:
                self._scratch.discard()
            self._scratch, self._hasher, self.received_bytes = None, Hasher(), 0

    def discard(self) -> None:
        """Forgets it, unless it was committed, and takes no more."""
        with self._lock:
            self.reset()
            self._is_discarded = True

    def _require_scratch(self) -> ScratchFile:
        if self._is_discarded:
            raise Refused("nobody waits for this transfer any more")
        if self._scratch is None:
            self._scratch = self._open_scratch()
        return self._scratch

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class PartialFileWriter:
    """One transfer's right to a `PartialFile`, for a thread that may go on when nobody waits for it
    any
    more: once it was left, or another one was made, everything here is Refused.
    """

    def __init__(self, partial: PartialFile) -> None:
        self._partial, self.digest = partial, partial.digest

    @property
    def received_bytes(self) -> int:
        """Bytes so far."""
        with self._require_ownership():
            return self._partial.received_bytes

    def write(self, content: bytes | memoryview) -> None:
        """Appends the bytes that come next. StorageFull."""
        with self._require_ownership():
            self._partial.write(content)

    def verify_and_commit(self, where: str = "") -> None:
        """Makes it durable in its place, once; Damaged, and all of it is forgotten, when it is not
        what its name says. StorageFull.
        """
        with self._require_ownership():
            if not self._partial.is_valid:
                self._partial.reset()
                raise CorruptData(f"chunk {self.digest} arrived changed", where=where)
            self._partial.commit()

    def release(self) -> None:
        """Nothing is written any more but the piece that is being written. It does not wait."""
        if self._partial._current_writer is self:
            self._partial._current_writer = None

    @contextmanager
    def _require_ownership(self) -> Iterator[None]:
        with self._partial._lock:
            if self._partial._current_writer is not self:
                raise Refused("nobody waits for this transfer any more")
            yield

    def __enter__(self) -> PartialFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class ParkedUploads:
    """What connections that broke have left. Whoever holds it ages it."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """`monotonic`: monotonic, in seconds."""
        self._monotonic = monotonic
        # Oldest first: the time when it goes, and whose it is.
        self._uploads: list[tuple[float, str, PartialFile]] = []

    def park(self, user: str, partial: PartialFile) -> None:
        """Lets a client go on with it for a while."""
        if len(self._uploads) == MAX_PARKED:
            self._uploads.pop(0)[-1].discard()
        self._uploads.append((self._monotonic() + PARKED_TIMEOUT_S, user, partial))

    def take(self, user: str, digest: str) -> PartialFile | None:
        """The longest of this digest that this user has brought, which is the caller's then."""
        found = [one for _, whose, one in self._uploads if (whose, one.digest) == (user, digest)]
        if not found:
            return None
        longest = max(found, key=lambda one: one.received_bytes)
        self._uploads = [kept for kept in self._uploads if kept[-1] is not longest]
        return longest

    def discard_expired(self) -> None:
        """Forgets what nobody has gone on with."""
        while self._uploads and self._uploads[0][0] < self._monotonic():
            self._uploads.pop(0)[-1].discard()

    def clear(self) -> None:
        """Forgets all."""
        while self._uploads:
            self._uploads.pop()[-1].discard()
