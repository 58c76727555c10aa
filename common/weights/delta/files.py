"""Chunk files that deltas are made from and make. Blocking."""

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
# one page fault for all pages, where Linux supports it
MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


def map_chunk(chunks: ChunkStore, digest: str) -> memoryview:
    """Map the bytes of a chunk as long as the view is referenced, without checking them.

    Raises:
        NotFound: No such chunk.
    """
    with chunks.open(digest) as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        flags = mmap.MAP_SHARED | MAP_POPULATE
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=flags))


def make_delta(stores: Sequence[ChunkStore], pair: ChunkPair) -> bytes | None:
    """Return the delta between two chunks of this host.

    None if it is not worthwhile, or one of the chunks is in none of the stores.
    """
    contents: list[memoryview] = []
    for digest in (pair.old_digest, pair.new_digest):
        here = next((place for place in stores if place.has(digest)), None)
        if here is None:
            return None
        with suppress(NotFound):  # removed since the check
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
    """Make a chunk from another one by a delta: its file is complete and valid, or absent.

    The file is not durable, like everything in a cache.

    Args:
        ignore_lock: Proceed although another process makes the chunk.
    Returns:
        False if the file exists already (it is not verified); None while another process makes it.
    Raises:
        NotFound: The old chunk is missing.
        BadMessage: The blob is no delta of it.
        CorruptData: The result has another digest.
        StorageFull: The disk is full.
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
        os.close(descriptor)  # releases the lock


def save_delta(chunks: ChunkStore, blob: bytes) -> str:
    """Save a delta in a store of this host, not durably, and return its digest.

    If a power failure corrupts the delta, its digest does not match and its chunks are pulled in
    full.
    """
    digest = compute_digest(blob)
    if not (chunks.has(digest) and chunks.is_valid(digest) and chunks.mark_written(digest)):
        chunks.save(digest, blob)
    return digest
