"""The paged cache of the slots: a block table that grows with their tokens and shares prefixes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshrl.common.generation.batch.blocks import (
    BLOCK,
    BlockPool,
    PrefixCache,
)
from meshrl.common.generation.batch.parts import Rows
from meshrl.common.generation.batch.slots import Slots

EVICTED = 16  # blocks at once: each search begins at the front


class PagedMemory:
    """`table[slot]` names the blocks of a slot's tokens, in order; `held[slot]` of them are its.

    `blocks` must hold one slot of full length and one block beside.
    """

    def __init__(self, slots: Slots, blocks: int, copy: Callable[[int, int], None]) -> None:
        self._slots = slots
        self._copy = copy  # (from, to): of a block's keys and values
        self.table = np.zeros((slots.count, -(-slots.max_length // BLOCK)), np.int32)
        self.held = np.zeros(slots.count, np.int64)
        self.pool = BlockPool(blocks)
        self.prefixes = PrefixCache(self.pool)
        self._untouched = np.zeros(slots.count, np.int64)  # computed tokens that it did not run

    def place(self, slot: int) -> None:
        """Readies a slot for its new request: blocks behind its computed tokens are given up, and a
        shared last block is replaced by a copy.
        """
        computed = int(self._slots.computed[slot])
        keep = -(-computed // BLOCK)
        for index in range(keep, int(self.held[slot])):
            self.pool.drop(int(self.table[slot, index]))
        self.held[slot] = min(self.held[slot], keep)
        if computed % BLOCK:
            self.prefixes.forget_tail(int(self.table[slot, keep - 1]))  # it is written again
        if computed % BLOCK and self.pool.holders[self.table[slot, keep - 1]] > 1:
            # The last block is shared, and the next token would go into it.
            if self._available() == 0:
                self.pool.drop(int(self.table[slot, keep - 1]))
                self.held[slot] = keep - 1
                self._slots.computed[slot] = (keep - 1) * BLOCK
            else:
                shared = int(self.table[slot, keep - 1])
                self.table[slot, keep - 1] = self._take()
                self._copy(shared, int(self.table[slot, keep - 1]))
                self.pool.drop(shared)
        self._untouched[slot] = self._slots.computed[slot]

    def share(self, slot: int) -> None:
        """Gives the slot the blocks of others that begin with the same tokens under the same
        weights.
        """
        slots = self._slots
        computed, weights = int(slots.computed[slot]), slots.current(slot)
        if computed != self._untouched[slot] or (computed and slots.weights[slot] != weights):
            return
        match = self.prefixes.match(slots.tokens[slot, : slots.known[slot] - 1], weights)
        if match.tokens <= computed:
            return
        for block in match.blocks:
            self.pool.hold(block)
        copied = None
        if match.tail:
            self.pool.hold(match.copied)  # making room for the copy must not take it away
            if self._available():
                copied = self._take()
                self._copy(match.copied, copied)
            self.pool.drop(match.copied)
        self.free(slot)
        held = len(match.blocks)
        self.table[slot, :held] = match.blocks
        if copied is not None:
            self.table[slot, held] = copied
            held += 1
        self.held[slot] = held
        slots.computed[slot] = match.tokens if copied is not None else held * BLOCK
        slots.weights[slot] = weights
        self._untouched[slot] = slots.computed[slot]

    def publish(self, slot: int, tail: bool) -> None:
        """Lets others share the slot's full blocks, and with `tail` its last one too."""
        slots = self._slots
        computed, weights = int(slots.computed[slot]), slots.current(slot)
        if computed and slots.weights[slot] == weights:
            used = self.table[slot, : -(-computed // BLOCK)]
            self.prefixes.insert(slots.tokens[slot, :computed], used, tail, weights)

    def grow(self, slot: int, tokens: int, spare: int = 0) -> bool:
        """Takes blocks for the slot's first `tokens` tokens. False: the pool has too few for them
        and `spare` more.
        """
        wanted = -(-tokens // BLOCK) - int(self.held[slot])
        if wanted <= 0:
            return True
        if self.pool.free < wanted + spare and self._available() < wanted + spare:
            return False
        for _ in range(wanted):
            self.table[slot, self.held[slot]] = self._take()
            self.held[slot] += 1
        return True

    def short(self, slots: Rows, tokens: Rows) -> Rows:
        """The slots of `slots` whose first `tokens[i]` tokens have no blocks yet."""
        return slots[self.held[slots] * BLOCK < tokens]

    def free(self, slot: int) -> None:
        """Gives up all blocks of the slot."""
        for index in range(int(self.held[slot])):
            self.pool.drop(int(self.table[slot, index]))
        self.held[slot] = 0
        self._slots.computed[slot] = self._untouched[slot] = 0

    def forget(self) -> None:
        """Makes nothing shareable that is computed so far."""
        self.prefixes.clear()

    def borrow(self, tokens: int) -> NDArray[np.int64] | None:
        """The numbers of free blocks for `tokens` tokens, int64, until `give_back`; None: there are
        too few.
        """
        wanted = -(-tokens // BLOCK)
        if self._available() < wanted:
            return None
        return np.array([self._take() for _ in range(wanted)], np.int64)

    def give_back(self, blocks: NDArray[np.int64]) -> None:
        """Returns blocks that `borrow` gave."""
        for block in blocks.tolist():
            self.pool.drop(block)

    def _available(self) -> int:
        return self.pool.free + self.prefixes.evictable()

    def _take(self) -> int:
        if not self.pool.free:
            self.prefixes.evict(EVICTED)
        return self.pool.take()
