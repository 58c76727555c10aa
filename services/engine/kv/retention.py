"""Which chunks go when there is no room: those whose loss costs the least for the room they take.

What losing one costs is the chance that it is used, times what it takes to have it again beyond
what it takes to load it from here. A trajectory that waits for a tool comes back; a prefix that
anybody may share comes back the less likely, the longer nobody has asked for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from meshrl.services.engine.kv.chunk_files import FoundChunk

HALF_S = 600.0  # without use, after which a shared prefix is half as likely to be used again
WAITS = 0.9  # chance that a trajectory whose cache is kept goes on: tools fail, jobs end
DEAD_SCRATCH_S = 60.0  # since its last byte: whoever wrote it was killed


def chance(found: FoundChunk, now_s: float, waiting: Collection[int]) -> float:
    """How likely a chunk is to be used. `waiting`: tags of sessions that may go on."""
    head = found.head
    if head is None:
        return 0.0
    if head.session:
        return WAITS if head.session in waiting else 0.0
    return float(0.5 ** (max(0.0, now_s - found.used_s) / HALF_S))


def cost_of_loss(
    found: FoundChunk, now_s: float, waiting: Collection[int], again_s: float
) -> float:
    """Seconds per byte. `again_s`: that it takes to load a byte from the next tier; 0: there is
    none, and the chunk is computed again.
    """
    if found.head is None or not found.bytes:
        return 0.0
    seconds = found.head.seconds
    if again_s:
        seconds = min(seconds, again_s * found.bytes)
    return chance(found, now_s, waiting) * seconds / found.bytes


def leaving(
    there: Iterable[FoundChunk],
    wanted: int,
    now_s: float,
    waiting: Collection[int],
    again_s: float = 0.0,
) -> list[FoundChunk]:
    """What goes so that `wanted` bytes are free, cheapest first; less where the rest is in use."""
    free = [one for one in there if _may_go(one, now_s)]
    free.sort(key=lambda one: (cost_of_loss(one, now_s, waiting, again_s), one.used_s))
    gone: list[FoundChunk] = []
    for one in free:
        if wanted <= 0:
            break
        gone.append(one)
        wanted -= one.bytes
    return gone


def _may_go(found: FoundChunk, now_s: float) -> bool:
    """Not what is being written, and not what an engine is about to load."""
    if found.head is None:
        return now_s - found.used_s > DEAD_SCRATCH_S
    return found.used_s <= now_s
