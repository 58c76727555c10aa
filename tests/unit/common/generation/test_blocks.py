"""The prefix cache gives back what was put in; no block is lost or shared wrongly."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from meshrl.common.generation.batch.blocks import BLOCK, BlockPool, PrefixCache
from meshrl.common.generation.batch.paged import PagedMemory
from meshrl.common.generation.batch.slots import Slots

tokens_of = st.lists(st.integers(0, 1), max_size=5 * BLOCK).map(lambda t: np.array(t, np.int64))


def shared(known: np.ndarray, asked: np.ndarray) -> int:
    """Tokens of `asked` that can be taken over: whole blocks, and out of the last one that is not
    full."""
    n = min(len(known), len(asked))
    same = known[:n] == asked[:n]
    common = n if same.all() else int(same.argmin())
    in_tail = common // BLOCK == len(known) // BLOCK
    return common if in_tail else common // BLOCK * BLOCK


@settings(max_examples=200)
@given(known=st.lists(tokens_of, max_size=6), asked=tokens_of)
def test_the_longest_known_prefix_is_found(known: list[np.ndarray], asked: np.ndarray) -> None:
    pool = BlockPool(200)
    cache = PrefixCache(pool)
    holds: dict[int, np.ndarray] = {}  # block -> the sequence's tokens up to its end
    for sequence in known:
        blocks = np.array([pool.take() for _ in range(-(-len(sequence) // BLOCK))], np.int32)
        for i, block in enumerate(blocks.tolist()):
            holds[block] = sequence[: (i + 1) * BLOCK]
        cache.insert(sequence, blocks, tail=True)
    match = cache.match(asked)
    assert match.tokens == max((shared(sequence, asked) for sequence in known), default=0)
    for i, block in enumerate(match.blocks):
        assert np.array_equal(holds[block], asked[: (i + 1) * BLOCK])
    if match.tail:
        copied = holds[match.copied][len(match.blocks) * BLOCK :]
        start = len(match.blocks) * BLOCK
        assert np.array_equal(copied[: match.tail], asked[start : start + match.tail])


def test_what_was_used_longest_ago_goes_first_and_leaves_before_their_parents() -> None:
    pool = BlockPool(10)
    cache = PrefixCache(pool)
    first, second = np.zeros(2 * BLOCK, np.int64), np.ones(2 * BLOCK, np.int64)
    for sequence in (first, second):
        blocks = np.array([pool.take(), pool.take()], np.int32)
        cache.insert(sequence, blocks, tail=False)
        for block in blocks.tolist():
            pool.drop(block)  # its request has ended
    assert pool.free == 6 and cache.evictable() == 4
    cache.match(first)
    cache.evict(1)
    assert cache.match(second).tokens == BLOCK and cache.match(first).tokens == 2 * BLOCK
    cache.evict(100)
    assert pool.free == 10 and cache.blocks == 0


class Memory(RuleBasedStateMachine):
    """Slots that start, grow, share, diverge and end, with and without an adapter, against what
    their tokens say.

    The cache is imitated by the token that each place of each block was written for, and the
    adapter that it was written with.
    """

    SLOTS, LENGTH, BLOCKS = 4, 4 * BLOCK, 11

    @initialize()
    def start(self) -> None:
        self.slots = Slots(self.SLOTS, self.LENGTH)
        self.written = np.full((self.BLOCKS, BLOCK, 2), -1)
        self.memory = PagedMemory(self.slots, self.BLOCKS, self.copy)
        self.slots.numbers[1] = self.numbered = 1

    def copy(self, source: int, target: int) -> None:
        self.written[target] = self.written[source]

    @rule(
        slot=st.integers(0, 3),
        tokens=tokens_of,
        kept=st.integers(0, 4 * BLOCK),
        adapter=st.integers(0, 1),
    )
    def place(self, slot: int, tokens: np.ndarray, kept: int, adapter: int) -> None:
        """A request whose first tokens may be those that the slot has."""
        if self.slots.adapter[slot] != adapter:
            self.slots.adapter[slot], self.slots.computed[slot] = adapter, 0
        have = int(self.slots.computed[slot])
        kept = min(kept, have)
        whole = np.concatenate((self.slots.tokens[slot, :kept], tokens, [0, 1]))[: self.LENGTH - 1]
        self.slots.tokens[slot, : len(whole)] = whole
        self.slots.known[slot] = len(whole)
        self.slots.computed[slot] = min(kept, len(whole) - 1)
        if self.slots.computed[slot] == 0:
            self.slots.weights[slot] = self.slots.current(slot)
        self.memory.place(slot)
        self.memory.share(slot)

    @rule(slot=st.integers(0, 3), count=st.integers(1, 3 * BLOCK))
    def compute(self, slot: int, count: int) -> None:
        known, computed = int(self.slots.known[slot]), int(self.slots.computed[slot])
        end = min(known, computed + count)
        if end == computed or not self.memory.grow(slot, end):
            return
        if computed == 0:
            self.slots.weights[slot] = self.slots.current(slot)
        for position in range(computed, end):
            block = self.memory.table[slot, position // BLOCK]
            about = self.slots.tokens[slot, position], self.slots.adapter[slot]
            self.written[block, position % BLOCK] = about
        self.slots.computed[slot] = end
        self.memory.publish(slot, tail=end % 2 == 0)

    @rule(slot=st.integers(0, 3))
    def free(self, slot: int) -> None:
        self.memory.free(slot)
        self.slots.known[slot] = 0

    @rule()
    def swap(self) -> None:
        self.slots.numbers[:2] = self.numbered + 1, self.numbered + 2
        self.numbered += 2
        self.memory.forget()

    @rule()
    def load(self) -> None:
        """A new version of the adapter."""
        self.numbered += 1
        self.slots.numbers[1] = self.numbered

    @invariant()
    def every_slot_reads_its_own_tokens(self) -> None:
        for slot in range(self.SLOTS):
            for position in range(int(self.slots.computed[slot])):
                block = self.memory.table[slot, position // BLOCK]
                token, adapter = self.written[block, position % BLOCK]
                assert token == self.slots.tokens[slot, position]
                assert adapter == self.slots.adapter[slot]

    @invariant()
    def every_holder_is_counted(self) -> None:
        held = np.zeros(self.BLOCKS, int)
        for slot in range(self.SLOTS):
            for index in range(int(self.memory.held[slot])):
                held[self.memory.table[slot, index]] += 1
        in_tree = self.memory.pool.holders - held
        assert ((in_tree == 0) | (in_tree == 1)).all()
        assert in_tree.sum() == self.memory.prefixes.blocks
        assert (self.memory.pool.holders == 0).sum() == self.memory.pool.free


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=30)
