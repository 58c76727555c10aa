"""Choice of the chunks to evict: those whose loss costs the least per byte.

The cost of a loss is the probability of reuse, times the time to obtain the chunk again beyond the
time to load it from here. A trajectory that waits for a tool comes back. A shared prefix is less
likely to be used, the longer no request has used it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from meshrl.services.engine.kv.chunk_files import StoredChunk

HALF_LIFE_S = 600.0  # unused time that halves the probability of reuse of a shared prefix
RESUME_PROBABILITY = (
    0.9  # probability that a trajectory with an offloaded cache continues: tools fail, jobs end
)
SCRATCH_EXPIRY_S = 60.0  # time without a new byte after which the writer counts as killed


def predict_reuse(chunk: StoredChunk, now_s: float, resumable: Collection[int]) -> float:
    """Return the probability of reuse; `resumable` holds the tags of resumable sessions."""
    head = chunk.header
    if head is None:
        return 0.0
    if head.session_tag:
        return RESUME_PROBABILITY if head.session_tag in resumable else 0.0
    return float(0.5 ** (max(0.0, now_s - chunk.last_used_s) / HALF_LIFE_S))


def compute_eviction_cost(
    chunk: StoredChunk, now_s: float, resumable: Collection[int], reload_s_per_byte: float
) -> float:
    """Return the cost of an eviction, in seconds per byte.

    `reload_s_per_byte` is the time to load a byte from the next tier; 0: there is none, and the
    chunk is computed again.
    """
    if chunk.header is None or not chunk.bytes:
        return 0.0
    seconds = chunk.header.compute_s
    if reload_s_per_byte:
        seconds = min(seconds, reload_s_per_byte * chunk.bytes)
    return predict_reuse(chunk, now_s, resumable) * seconds / chunk.bytes


def choose_evictions(
    chunks: Iterable[StoredChunk],
    needed_bytes: int,
    now_s: float,
    resumable: Collection[int],
    reload_s_per_byte: float = 0.0,
) -> list[StoredChunk]:
    """Choose evictions, cheapest first, until `needed_bytes` are free.

    Fewer if the rest is in use.
    """
    free = [one for one in chunks if _is_evictable(one, now_s)]
    free.sort(
        key=lambda one: (
            compute_eviction_cost(one, now_s, resumable, reload_s_per_byte),
            one.last_used_s,
        )
    )
    evicted: list[StoredChunk] = []
    for one in free:
        if needed_bytes <= 0:
            break
        evicted.append(one)
        needed_bytes -= one.bytes
    return evicted


def _is_evictable(chunk: StoredChunk, now_s: float) -> bool:
    """Return False for a chunk that is being written or that an engine is about to load."""
    if chunk.header is None:
        return now_s - chunk.last_used_s > SCRATCH_EXPIRY_S
    return chunk.last_used_s <= now_s
