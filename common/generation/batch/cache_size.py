"""Size of an engine's paged cache, from the memory that is free for it.

Slots limit concurrency, not memory: a cache may hold fewer tokens than all slots at full length.
Requests without blocks then wait, or are preempted and computed again. `measure_free_bytes` in
`builtin/free_memory.py` reads the memory; this module has only the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.memory.cache_blocks import (
    BLOCK_TOKENS,
    count_blocks,
    count_full_blocks,
    count_least_blocks,
)

KEY = "rollout.kv_memory"
# Shares of free memory that `auto` takes. The rest is for fragmentation, and beside other processes
# for their gradients and activations, which may not be allocated yet.
GPU_SHARE = 0.9  # of a GPU that the engine has alone
TIME_SLICED_SHARE = 0.45  # of a GPU that the engine shares by time slices
HOST_SHARE = 0.5  # of a host's memory, divided by the workers there
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Size of a paged cache in blocks of BLOCK_TOKENS tokens."""

    num_blocks: int
    num_full_blocks: int  # blocks of all slots at full length
    block_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_blocks * BLOCK_TOKENS

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def is_full(self) -> bool:
        """True if no request ever waits for a block or is preempted."""
        return self.num_blocks >= self.num_full_blocks

    def describe(self) -> str:
        """Return the size for the engine's log."""
        full = self.num_full_blocks * BLOCK_TOKENS
        share = "all slots at full length" if self.is_full else f"{full:,} of all slots"
        return f"cache of {self.num_tokens:,} tokens, {self.size_bytes / GIB:.3g} GiB ({share})"


def choose_auto_share(device: str, *, is_time_sliced: bool = False, num_workers: int = 1) -> float:
    """Return the share of free memory that `auto` takes on `device` ("cpu" or "cuda").

    `num_workers`: workers that share a host's memory; a GPU is of one worker.
    """
    if device == "cuda":
        return TIME_SLICED_SHARE if is_time_sliced else GPU_SHARE
    return HOST_SHARE / num_workers


def plan_cache_blocks(
    free_bytes: int,
    share: float,
    block_bytes: int,
    num_slots: int,
    max_length: int,
    *,
    size_bytes: int = 0,
) -> CachePlan:
    """Plan a cache within a share of free memory, or within `size_bytes` if it is not 0.

    The cache never exceeds all slots at full length. It holds at least one sequence of `max_length`
    tokens and one more block, and a share yields to that minimum.

    Args:
        free_bytes: Memory without weights, activations and graphs.
        share: Share of it, above 0 and at most 1.
        block_bytes: Bytes of one block's keys and values, all layers together.

    Raises:
        ConfigError: The minimum does not fit.
    """
    num_full, num_least = count_full_blocks(num_slots, max_length), count_least_blocks(max_length)
    least_bytes = num_least * block_bytes
    room_bytes = min(size_bytes or max(int(free_bytes * share), least_bytes), free_bytes)
    if room_bytes < least_bytes:
        limit = f"{KEY} allows" if 0 < size_bytes < free_bytes else "free for the cache are"
        raise ConfigError(
            f"one sequence of {max_length} tokens needs {least_bytes / GIB:.3g} GiB of keys and "
            f"values, and {limit} {max(room_bytes, 0) / GIB:.3g} GiB",
            where=KEY,
            fix=f"Raise {KEY} if it limits the cache, or lower max_tokens, set the engine's dtype "
            "to bfloat16, or end other processes on the device",
        )
    return CachePlan(min(num_full, room_bytes // block_bytes), num_full, block_bytes)


def plan_cache_tokens(tokens: int, block_bytes: int, num_slots: int, max_length: int) -> CachePlan:
    """Plan a cache of `tokens` tokens, and at least of one sequence and one more block."""
    num_blocks = max(count_blocks(tokens), count_least_blocks(max_length))
    return CachePlan(num_blocks, count_full_blocks(num_slots, max_length), block_bytes)
