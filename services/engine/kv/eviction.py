"""Which chunks go when there is no room: those whose loss costs the least for the room they take.

What losing one costs is the chance that it is used, times what it takes to have it again beyond
what it takes to load it from here. A trajectory that waits for a tool comes back; a prefix that
anybody may share comes back the less likely, the longer nobody has asked for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from meshrl.services.engine.kv.chunk_files import StoredChunk

HALF_LIFE_S = 600.0  # without use, after which a shared prefix is half as likely to be used again
RESUME_PROBABILITY = (
    0.9  # chance that a trajectory whose cache is kept goes on: tools fail, jobs end
)
SCRATCH_EXPIRY_S = 60.0  # since its last byte: whoever wrote it was killed


def predict_reuse(chunk: StoredChunk, now_s: float, resumable: Collection[int]) -> float:
    """How likely a chunk is to be used. `waiting`: tags of sessions that may go on."""
    head = chunk.header
    if head is None:
        return 0.0
    if head.session_tag:
        return RESUME_PROBABILITY if head.session_tag in resumable else 0.0
    return float(0.5 ** (max(0.0, now_s - chunk.last_used_s) / HALF_LIFE_S))


def compute_eviction_cost(
    chunk: StoredChunk, now_s: float, resumable: Collection[int], reload_s_per_byte: float
) -> float:
    """Seconds per byte. `again_s`: that it takes to load a byte from the next tier; 0: there is
    none, and the chunk is computed again.
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
    """What goes so that `wanted` bytes are free, cheapest first; less where the rest is in use."""
    free = [one for one in chunks if _is_evictable(one, now_s)]
    free.sort(
        key=lambda one: (
            compute_eviction_cost(one, now_s, resumable, reload_s_per_byte),
            one.last_used_s,
        )
    )
    gone: list[StoredChunk] = []
    for one in free:
        if needed_bytes <= 0:
            break
        gone.append(one)
        needed_bytes -= one.bytes
    return gone


def _is_evictable(chunk: StoredChunk, now_s: float) -> bool:
    """Not what is being written, and not what an engine is about to load."""
    if chunk.header is None:
        return now_s - chunk.last_used_s > SCRATCH_EXPIRY_S
    return chunk.last_used_s <= now_s
