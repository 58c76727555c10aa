"""A file that arrives in pieces: what is there so far, beside the place that it is for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshrl.common.base.digest import Hasher
from meshrl.common.base.errors import Damaged, Refused
from meshrl.common.weights.chunks.chunks import ChunkStore, Scratch

PARKED_S = 60.0  # how long a client whose connection broke has to go on
PARKED = 16  # of them at most; the oldest makes room


class Partial:
    """What has arrived of the bytes of `digest`. To leave it is to forget what was not committed.

    A thread writes while whoever began it may leave, or another one may go on: what is written
    after that is refused (`writer`).
    """

    def __init__(
        self, digest: str, scratch: Callable[[], Scratch], chunks: ChunkStore | None = None
    ) -> None:
        """`scratch`: makes room, when the first bytes are there. `chunks`: the store whose chunk it
        is.
        """
        self.digest = digest
        self.position = 0  # bytes so far
        self._make, self._chunks = scratch, chunks
        self._scratch: Scratch | None = None
        self._hashed = Hasher()
        self._over = self._committed = False
        self._writer: Writer | None = None
        self._lock = threading.RLock()

    @classmethod
    def of_file(cls, path: Path, digest: str) -> Partial:
        """For a file of any name."""
        return cls(digest, lambda: Scratch(path, lambda _: None))

    @classmethod
    def of_chunk(cls, chunks: ChunkStore, digest: str, *, durable: bool = True) -> Partial:
        """For a chunk of a store; of a cache it need not be durable."""
        return cls(digest, lambda: chunks.scratch(digest, durable=durable), chunks)

    @property
    def right(self) -> bool:
        """Whether what has arrived is all there is, and nothing else."""
        return bool(self._hashed.hexdigest() == self.digest)

    def writer(self) -> Writer:
        """Who alone may write from now on, until it is left: whoever did before is refused."""
        self._writer = made = Writer(self)
        return made

    def write(self, content: bytes | memoryview) -> None:
        """Appends the bytes that come next, by whoever has it for itself. StorageFull."""
        with self._lock:
            self._room().write(content)
            self._hashed.update(content)
            self.position += len(content)

    def commit(self) -> None:
        """Makes it durable in its place, over what is there, once. StorageFull."""
        with self._lock:
            if not self._committed:
                self._room().commit()
                if self._chunks is not None and self.right:
                    self._chunks.verified(self.digest)
            self._committed = True

    def begin_again(self) -> None:
        """Forgets what has arrived so far."""
        with self._lock:
            if self._scratch is not None:
                self._scratch.discard()
            self._scratch, self._hashed, self.position = None, Hasher(), 0

    def discard(self) -> None:
        """Forgets it, unless it was committed, and takes no more."""
        with self._lock:
            self.begin_again()
            self._over = True

    def _room(self) -> Scratch:
        if self._over:
            raise Refused("nobody waits for this transfer any more")
        if self._scratch is None:
            self._scratch = self._make()
        return self._scratch

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class Writer:
    """One transfer's right to a `Partial`, for a thread that may go on when nobody waits for it any
    more: once it was left, or another one was made, everything here is Refused.
    """

    def __init__(self, partial: Partial) -> None:
        self._partial, self.digest = partial, partial.digest

    @property
    def position(self) -> int:
        """Bytes so far."""
        with self._own():
            return self._partial.position

    def write(self, content: bytes | memoryview) -> None:
        """Appends the bytes that come next. StorageFull."""
        with self._own():
            self._partial.write(content)

    def finish(self, where: str = "") -> None:
        """Makes it durable in its place, once; Damaged, and all of it is forgotten, when it is not
        what its name says. StorageFull.
        """
        with self._own():
            if not self._partial.right:
                self._partial.begin_again()
                raise Damaged(f"chunk {self.digest} arrived changed", where=where)
            self._partial.commit()

    def leave(self) -> None:
        """Nothing is written any more but the piece that is being written. It does not wait."""
        if self._partial._writer is self:
            self._partial._writer = None

    @contextmanager
    def _own(self) -> Iterator[None]:
        with self._partial._lock:
            if self._partial._writer is not self:
                raise Refused("nobody waits for this transfer any more")
            yield

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class Parked:
    """What connections that broke have left. Whoever holds it ages it."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now`: monotonic, in seconds."""
        self._now = now
        # Oldest first: the time when it goes, and whose it is.
        self._kept: list[tuple[float, str, Partial]] = []

    def keep(self, user: str, partial: Partial) -> None:
        """Lets a client go on with it for a while."""
        if len(self._kept) == PARKED:
            self._kept.pop(0)[-1].discard()
        self._kept.append((self._now() + PARKED_S, user, partial))

    def take(self, user: str, digest: str) -> Partial | None:
        """The longest of this digest that this user has brought, which is the caller's then."""
        found = [one for _, whose, one in self._kept if (whose, one.digest) == (user, digest)]
        if not found:
            return None
        longest = max(found, key=lambda one: one.position)
        self._kept = [kept for kept in self._kept if kept[-1] is not longest]
        return longest

    def age(self) -> None:
        """Forgets what nobody has gone on with."""
        while self._kept and self._kept[0][0] < self._now():
            self._kept.pop(0)[-1].discard()

    def clear(self) -> None:
        """Forgets all."""
        while self._kept:
            self._kept.pop()[-1].discard()
