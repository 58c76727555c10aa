"""Paged cache of the slots: a block table that grows with their tokens and shares prefixes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshrl.common.generation.batch.blocks import BlockPool, PrefixCache
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.batch.step_compute import SlotIndices
from meshrl.common.job.memory.cache_blocks import BLOCK_TOKENS

EVICT_BATCH_BLOCKS = 16  # blocks per allocation, because each search begins at the front


class PagedCache:
    """Block table and blocks of the slots.

    `table[slot]` lists the blocks of a slot's tokens in order; its first `held[slot]` entries are
    valid. There are no blocks before `resize`.
    """

    def __init__(self, slots: Slots, copy_block: Callable[[int, int], None]) -> None:
        self._slots = slots
        self._copy_block = copy_block  # (from, to): pending copies of a block's keys and values
        self.block_table = np.zeros(
            (slots.num_slots, -(-slots.max_length // BLOCK_TOKENS)), np.int32
        )
        self.blocks_per_slot = np.zeros(slots.num_slots, np.int64)
        self.resize(0)
        # tokens that are cached without being computed by the slot
        self._num_reused_tokens = np.zeros(slots.num_slots, np.int64)

    def resize(self, num_blocks: int) -> None:
        """Replace the blocks, of which no slot has any, by `num_blocks` free ones.

        They must hold one slot of full length and one more block.
        """
        self.block_pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(self.block_pool)

    def prepare_slot(self, slot: int) -> None:
        """Prepare the slot for its new request.

        Release the blocks behind its computed tokens, and replace a shared last block by a copy.
        """
        computed = int(self._slots.num_computed_tokens[slot])
        keep = -(-computed // BLOCK_TOKENS)
        for index in range(keep, int(self.blocks_per_slot[slot])):
            self.block_pool.remove_reference(int(self.block_table[slot, index]))
        self.blocks_per_slot[slot] = min(self.blocks_per_slot[slot], keep)
        if computed % BLOCK_TOKENS:
            # the block is written again
            self.prefix_cache.remove_tail(int(self.block_table[slot, keep - 1]))
        if (
            computed % BLOCK_TOKENS
            and self.block_pool.ref_counts[self.block_table[slot, keep - 1]] > 1
        ):
            # The last block is shared, and the next token would go into it.
            if self._count_available() == 0:
                self.block_pool.remove_reference(int(self.block_table[slot, keep - 1]))
                self.blocks_per_slot[slot] = keep - 1
                self._slots.num_computed_tokens[slot] = (keep - 1) * BLOCK_TOKENS
            else:
                shared = int(self.block_table[slot, keep - 1])
                self.block_table[slot, keep - 1] = self._allocate_block()
                self._copy_block(shared, int(self.block_table[slot, keep - 1]))
                self.block_pool.remove_reference(shared)
        self._num_reused_tokens[slot] = self._slots.num_computed_tokens[slot]

    def reuse_prefix(self, slot: int) -> None:
        """Give the slot cached blocks of the same first tokens and the same weights."""
        slots = self._slots
        computed, weights = int(slots.num_computed_tokens[slot]), slots.get_weights_id(slot)
        if computed != self._num_reused_tokens[slot] or (
            computed and slots.cache_weights_id[slot] != weights
        ):
            return
        match = self.prefix_cache.match(slots.tokens[slot, : slots.num_tokens[slot] - 1], weights)
        if match.num_tokens <= computed:
            return
        for block in match.blocks:
            self.block_pool.add_reference(block)
        copied = None
        if match.num_tail_tokens:
            # an eviction for the copy must not free the block
            self.block_pool.add_reference(match.tail_block)
            if self._count_available():
                copied = self._allocate_block()
                self._copy_block(match.tail_block, copied)
            self.block_pool.remove_reference(match.tail_block)
        self.free_slot(slot)
        num_blocks = len(match.blocks)
        self.block_table[slot, :num_blocks] = match.blocks
        if copied is not None:
            self.block_table[slot, num_blocks] = copied
            num_blocks += 1
        self.blocks_per_slot[slot] = num_blocks
        slots.num_computed_tokens[slot] = (
            match.num_tokens if copied is not None else num_blocks * BLOCK_TOKENS
        )
        slots.cache_weights_id[slot] = weights
        self._num_reused_tokens[slot] = slots.num_computed_tokens[slot]

    def publish_prefix(self, slot: int, include_tail: bool) -> None:
        """Publish the slot's full blocks for sharing, and with `include_tail` its last one too."""
        slots = self._slots
        computed, weights = int(slots.num_computed_tokens[slot]), slots.get_weights_id(slot)
        if computed and slots.cache_weights_id[slot] == weights:
            used = self.block_table[slot, : -(-computed // BLOCK_TOKENS)]
            self.prefix_cache.insert(slots.tokens[slot, :computed], used, include_tail, weights)

    def allocate_blocks(self, slot: int, tokens: int, spare_blocks: int = 0) -> bool:
        """Allocate blocks for the slot's first `tokens` tokens.

        Return False if the pool has too few for them and `spare_blocks` more.
        """
        num_missing = -(-tokens // BLOCK_TOKENS) - int(self.blocks_per_slot[slot])
        if num_missing <= 0:
            return True
        if (
            self.block_pool.num_free < num_missing + spare_blocks
            and self._count_available() < num_missing + spare_blocks
        ):
            return False
        for _ in range(num_missing):
            self.block_table[slot, self.blocks_per_slot[slot]] = self._allocate_block()
            self.blocks_per_slot[slot] += 1
        return True

    def find_slots_short_of_blocks(self, slots: SlotIndices, tokens: SlotIndices) -> SlotIndices:
        """Return the slots of `slots` whose first `tokens[i]` tokens have too few blocks."""
        return slots[self.blocks_per_slot[slots] * BLOCK_TOKENS < tokens]

    def free_slot(self, slot: int) -> None:
        """Release all blocks of the slot."""
        for index in range(int(self.blocks_per_slot[slot])):
            self.block_pool.remove_reference(int(self.block_table[slot, index]))
        self.blocks_per_slot[slot] = 0
        self._slots.num_computed_tokens[slot] = self._num_reused_tokens[slot] = 0

    @property
    def used_blocks(self) -> NDArray[np.int32]:
        """Blocks with references, ascending."""
        return np.flatnonzero(self.block_pool.ref_counts).astype(np.int32)

    def clear_prefixes(self) -> None:
        """Drop all published prefixes."""
        self.prefix_cache.clear()

    def borrow_blocks(self, tokens: int) -> NDArray[np.int64] | None:
        """Borrow free blocks for `tokens` tokens until `return_blocks`; int64 numbers, None if too
        few.
        """
        num_blocks = -(-tokens // BLOCK_TOKENS)
        if self._count_available() < num_blocks:
            return None
        return np.array([self._allocate_block() for _ in range(num_blocks)], np.int64)

    def return_blocks(self, blocks: NDArray[np.int64]) -> None:
        """Return blocks that `borrow_blocks` lent."""
        for block in blocks.tolist():
            self.block_pool.remove_reference(block)

    def _count_available(self) -> int:
        return self.block_pool.num_free + self.prefix_cache.count_evictable()

    def _allocate_block(self) -> int:
        if not self.block_pool.num_free:
            self.prefix_cache.evict(EVICT_BATCH_BLOCKS)
        return self.block_pool.allocate()
