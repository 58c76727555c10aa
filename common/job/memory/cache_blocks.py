"""Blocks of the built-in engine's paged cache, and the tokens that one of its steps prefills."""

from __future__ import annotations

BLOCK_TOKENS = 16  # tokens; as kBlock in kernels/csrc/attention.h
# limit of known tokens in a step, so that decoding rows do not wait for long
MAX_PREFILL_TOKENS = 512


def count_blocks(tokens: int) -> int:
    """Return the number of blocks for `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


def count_full_blocks(num_slots: int, max_length: int) -> int:
    """Return the blocks of all slots at full length, at least `count_least_blocks`."""
    return max(num_slots * count_blocks(max_length), count_least_blocks(max_length))


def count_least_blocks(max_length: int) -> int:
    """Return the blocks of one sequence of full length, and one to copy a shared block into."""
    return count_blocks(max_length) + 1
