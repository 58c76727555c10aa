"""Chunk files as deltas are made of them and make them, off the loop."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import NotFound
from meshrl.common.weights.chunks.chunk_store import ChunkStore, try_lock
from meshrl.common.weights.delta.codec import ChunkPair, apply_delta, encode_delta

LOCKS_FOLDER = ".locks"  # below a cache
MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # one fault for all pages, where Linux has it


def map_chunk(chunks: ChunkStore, digest: str) -> memoryview:
    """The bytes of a chunk, mapped for as long as somebody refers to them; NotFound. They are not
    checked: what is made of them is.
    """
    with chunks.open(digest) as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        flags = mmap.MAP_SHARED | MAP_POPULATE
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=flags))


def make_delta(stores: Sequence[ChunkStore], pair: ChunkPair) -> bytes | None:
    """The delta between two chunks of this host; None where it is not worth it, or one of them is
    in none of these places.
    """
    contents: list[memoryview] = []
    for digest in (pair.old_digest, pair.new_digest):
        here = next((place for place in stores if place.has(digest)), None)
        if here is None:
            return None
        with suppress(NotFound):  # it has gone since
            contents.append(map_chunk(here, digest))
    return (
        encode_delta(contents[0], contents[1], pair.element_bytes) if len(contents) == 2 else None
    )


def make_chunk(
    chunks: ChunkStore,
    old_digest: str,
    blob: bytes | memoryview,
    new_digest: str,
    ignore_lock: bool,
) -> bool | None:
    """Makes a chunk of another one by a delta: its file is there whole and right, or not at all; it
    is not durable, as nothing of a cache is. False: there is a file already, which nobody has
    looked at; None while another process makes it, unless it is to be done `ignore_lock`. NotFound
    without the old one, BadMessage for what is no delta of it, Damaged when another chunk would
    come of it, StorageFull.
    """
    was = map_chunk(chunks, old_digest)
    lock = chunks.directory / LOCKS_FOLDER / f"delta-{new_digest[:2]}"
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not ignore_lock and not try_lock(descriptor):
            return None
        if chunks.has(new_digest):
            return False
        with chunks.write_chunk(new_digest) as write:
            apply_delta(was, blob, new_digest, write)
        return True
    finally:
        os.close(descriptor)  # and with it the lock


def save_delta(chunks: ChunkStore, blob: bytes) -> str:
    """Puts a delta among the chunks of a store on this host, not durably: one that a power cut took
    is found not to be what its name says, and what it stands for is pulled in full.
    """
    digest = compute_digest(blob)
    if not (chunks.has(digest) and chunks.is_valid(digest) and chunks.mark_written(digest)):
        chunks.save(digest, blob)
    return digest
