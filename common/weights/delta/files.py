"""Chunk files as deltas are made of them and make them, off the loop."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

from common.base.digest import digest_of
from common.base.errors import NotFound
from common.weights.chunks.chunks import ChunkStore
from common.weights.delta.codec import applied, encoded
from common.weights.delta.pairs import Pair

LOCKS = ".locks"  # below a cache
POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # one fault for all pages, where Linux has it


def content(chunks: ChunkStore, digest: str) -> memoryview:
    """The bytes of a chunk, mapped for as long as somebody refers to them; NotFound. They are not
    checked: what is made of them is.
    """
    path = chunks.path(digest)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(f"no chunk {digest}", where=str(path)) from None
    try:
        if not os.fstat(descriptor).st_size:
            return memoryview(b"")
        flags = mmap.MAP_SHARED | POPULATE
        return memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ, flags=flags))
    finally:
        os.close(descriptor)


def delta_of(places: Sequence[ChunkStore], pair: Pair) -> bytes | None:
    """The delta between two chunks of this host; None where it is not worth it, or one of them is
    in none of these places.
    """
    try:
        return encoded(_content(places, pair.old), _content(places, pair.new), pair.width)
    except NotFound:
        return None


def _content(places: Sequence[ChunkStore], digest: str) -> memoryview:
    for place in places:
        if place.has(digest):
            return content(place, digest)
    raise NotFound(f"no chunk {digest}")


def make(
    chunks: ChunkStore, old: str, blob: bytes | memoryview, new: str, alone: bool
) -> bool | None:
    """Makes a chunk of another one by a delta: its file is there whole and right, or not at all; it
    is not durable, as nothing of a cache is. False: there is a file already, which nobody has
    looked at; None while another process makes it, unless it is to be done `alone`. NotFound
    without the old one, BadMessage for what is no delta of it, Damaged when another chunk would
    come of it, StorageFull.
    """
    was = content(chunks, old)
    lock = chunks.directory / LOCKS / f"delta-{new[:2]}"
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not alone and not _taken(descriptor):
            return None
        if chunks.has(new):
            return False
        _make(chunks, was, blob, new)
        return True
    finally:
        os.close(descriptor)  # and with it the lock


def _make(chunks: ChunkStore, was: memoryview, blob: bytes | memoryview, new: str) -> None:
    scratch = chunks.scratch(new, durable=False)
    try:
        applied(was, blob, new, scratch.write)
        scratch.commit()
        chunks.verified(new)
    finally:
        scratch.discard()


def _taken(descriptor: int) -> bool:
    """Whether nobody else has the lock, as far as its file system can tell."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def keep(chunks: ChunkStore, blob: bytes) -> str:
    """Puts a delta among the chunks of a store on this host, not durably: one that a power cut took
    is found not to be what its name says, and what it stands for is pulled in full.
    """
    digest = digest_of(blob)
    if not (chunks.has(digest) and chunks.whole(digest) and chunks.touch(digest)):
        chunks.keep(digest, blob)
    return digest
