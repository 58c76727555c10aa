"""Chunk files as deltas are made of them and make them, off the loop."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

from meshrl.common.base.digest import digest_of
from meshrl.common.base.errors import NotFound
from meshrl.common.weights.chunks.chunks import ChunkStore, locked
from meshrl.common.weights.delta.codec import Pair, applied, encoded

LOCKS = ".locks"  # below a cache
POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # one fault for all pages, where Linux has it


def content(chunks: ChunkStore, digest: str) -> memoryview:
    """The bytes of a chunk, mapped for as long as somebody refers to them; NotFound. They are not
    checked: what is made of them is.
    """
    with chunks.open(digest) as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        flags = mmap.MAP_SHARED | POPULATE
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=flags))


def delta_of(places: Sequence[ChunkStore], pair: Pair) -> bytes | None:
    """The delta between two chunks of this host; None where it is not worth it, or one of them is
    in none of these places.
    """
    contents: list[memoryview] = []
    for digest in (pair.old, pair.new):
        here = next((place for place in places if place.has(digest)), None)
        if here is None:
            return None
        with suppress(NotFound):  # it has gone since
            contents.append(content(here, digest))
    return encoded(contents[0], contents[1], pair.width) if len(contents) == 2 else None


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
        if not alone and not locked(descriptor):
            return None
        if chunks.has(new):
            return False
        with chunks.making(new) as write:
            applied(was, blob, new, write)
        return True
    finally:
        os.close(descriptor)  # and with it the lock


def keep(chunks: ChunkStore, blob: bytes) -> str:
    """Puts a delta among the chunks of a store on this host, not durably: one that a power cut took
    is found not to be what its name says, and what it stands for is pulled in full.
    """
    digest = digest_of(blob)
    if not (chunks.has(digest) and chunks.whole(digest) and chunks.touch(digest)):
        chunks.keep(digest, blob)
    return digest
