"""Prefix cache, shapes of decode batches, and engines under memory pressure."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from meshrl.common.base.errors import ConfigError, Refused
from meshrl.common.generation.backends.buckets import GraphBuckets
from meshrl.common.generation.batch.blocks import BLOCK_TOKENS, BlockPool, PrefixCache
from meshrl.common.generation.batch.paged_cache import PagedCache
from meshrl.common.generation.batch.slots import Slots
from tests.unit.common.generation.engines_under_test import (
    TINY,
    Listener,
    built_in,
    decoder,
    request,
)
from tests.unit.common.generation.test_builtin_engine import Make, holds, make, words

tokens_of = st.lists(st.integers(0, 1), max_size=5 * BLOCK_TOKENS).map(
    lambda t: np.array(t, np.int64)
)
SLOTS, LENGTH = 48, 5000
BUCKETS = GraphBuckets(SLOTS, LENGTH)
lengths_of = st.lists(st.integers(1, LENGTH), min_size=1, max_size=SLOTS)
__all__ = ["make"]


def shared(known: np.ndarray, asked: np.ndarray) -> int:
    """Tokens of `asked` that can be taken over: whole blocks, and out of the last one that is not
    full."""
    n = min(len(known), len(asked))
    same = known[:n] == asked[:n]
    common = n if same.all() else int(same.argmin())
    in_tail = common // BLOCK_TOKENS == len(known) // BLOCK_TOKENS
    return common if in_tail else common // BLOCK_TOKENS * BLOCK_TOKENS


@settings(max_examples=200)
@given(known=st.lists(tokens_of, max_size=6), asked=tokens_of)
def test_the_longest_known_prefix_is_found(known: list[np.ndarray], asked: np.ndarray) -> None:
    pool = BlockPool(200)
    cache = PrefixCache(pool)
    holds: dict[int, np.ndarray] = {}  # block -> the sequence's tokens up to its end
    for sequence in known:
        blocks = np.array(
            [pool.allocate() for _ in range(-(-len(sequence) // BLOCK_TOKENS))], np.int32
        )
        for i, block in enumerate(blocks.tolist()):
            holds[block] = sequence[: (i + 1) * BLOCK_TOKENS]
        cache.insert(sequence, blocks, include_tail=True)
    match = cache.match(asked)
    assert match.num_tokens == max((shared(sequence, asked) for sequence in known), default=0)
    for i, block in enumerate(match.blocks):
        assert np.array_equal(holds[block], asked[: (i + 1) * BLOCK_TOKENS])
    if match.num_tail_tokens:
        copied = holds[match.tail_block][len(match.blocks) * BLOCK_TOKENS :]
        start = len(match.blocks) * BLOCK_TOKENS
        assert np.array_equal(
            copied[: match.num_tail_tokens], asked[start : start + match.num_tail_tokens]
        )


def test_what_was_used_longest_ago_goes_first_and_leaves_before_their_parents() -> None:
    pool = BlockPool(10)
    cache = PrefixCache(pool)
    first, second = np.zeros(2 * BLOCK_TOKENS, np.int64), np.ones(2 * BLOCK_TOKENS, np.int64)
    for sequence in (first, second):
        blocks = np.array([pool.allocate(), pool.allocate()], np.int32)
        cache.insert(sequence, blocks, include_tail=False)
        for block in blocks.tolist():
            pool.remove_reference(block)  # its request has ended
    assert pool.num_free == 6 and cache.count_evictable() == 4
    cache.match(first)
    cache.evict(1)
    assert (
        cache.match(second).num_tokens == BLOCK_TOKENS
        and cache.match(first).num_tokens == 2 * BLOCK_TOKENS
    )
    cache.evict(100)
    assert pool.num_free == 10 and cache.num_blocks == 0


class Memory(RuleBasedStateMachine):
    """Slots that start, grow, share, diverge and end, with and without an adapter, against what
    their tokens say.

    The cache is imitated by the token that each place of each block was written for, and the
    adapter that it was written with.
    """

    SLOTS, LENGTH, BLOCKS = 4, 4 * BLOCK_TOKENS, 11

    @initialize()
    def start(self) -> None:
        self.slots = Slots(self.SLOTS, self.LENGTH)
        self.written = np.full((self.BLOCKS, BLOCK_TOKENS, 2), -1)
        self.memory = PagedCache(self.slots, self.BLOCKS, self.copy)
        self.slots.weights_ids[1] = self.numbered = 1

    def copy(self, source: int, target: int) -> None:
        self.written[target] = self.written[source]

    @rule(
        slot=st.integers(0, 3),
        tokens=tokens_of,
        kept=st.integers(0, 4 * BLOCK_TOKENS),
        adapter=st.integers(0, 1),
    )
    def place(self, slot: int, tokens: np.ndarray, kept: int, adapter: int) -> None:
        """A request whose first tokens may be those that the slot has."""
        if self.slots.adapter_index[slot] != adapter:
            self.slots.adapter_index[slot], self.slots.num_computed_tokens[slot] = adapter, 0
        have = int(self.slots.num_computed_tokens[slot])
        kept = min(kept, have)
        whole = np.concatenate((self.slots.tokens[slot, :kept], tokens, [0, 1]))[: self.LENGTH - 1]
        self.slots.tokens[slot, : len(whole)] = whole
        self.slots.num_tokens[slot] = len(whole)
        self.slots.num_computed_tokens[slot] = min(kept, len(whole) - 1)
        if self.slots.num_computed_tokens[slot] == 0:
            self.slots.cache_weights_id[slot] = self.slots.get_weights_id(slot)
        self.memory.prepare_slot(slot)
        self.memory.reuse_prefix(slot)

    @rule(slot=st.integers(0, 3), count=st.integers(1, 3 * BLOCK_TOKENS))
    def compute(self, slot: int, count: int) -> None:
        known, computed = (
            int(self.slots.num_tokens[slot]),
            int(self.slots.num_computed_tokens[slot]),
        )
        end = min(known, computed + count)
        if end == computed or not self.memory.allocate_blocks(slot, end):
            return
        if computed == 0:
            self.slots.cache_weights_id[slot] = self.slots.get_weights_id(slot)
        for position in range(computed, end):
            block = self.memory.block_table[slot, position // BLOCK_TOKENS]
            about = self.slots.tokens[slot, position], self.slots.adapter_index[slot]
            self.written[block, position % BLOCK_TOKENS] = about
        self.slots.num_computed_tokens[slot] = end
        self.memory.publish_prefix(slot, include_tail=end % 2 == 0)

    @rule(slot=st.integers(0, 3))
    def free(self, slot: int) -> None:
        self.memory.free_slot(slot)
        self.slots.num_tokens[slot] = 0

    @rule()
    def swap(self) -> None:
        self.slots.weights_ids[:2] = self.numbered + 1, self.numbered + 2
        self.numbered += 2
        self.memory.clear_prefixes()

    @rule()
    def load(self) -> None:
        """A new version of the adapter."""
        self.numbered += 1
        self.slots.weights_ids[1] = self.numbered

    @invariant()
    def every_slot_reads_its_own_tokens(self) -> None:
        for slot in range(self.SLOTS):
            for position in range(int(self.slots.num_computed_tokens[slot])):
                block = self.memory.block_table[slot, position // BLOCK_TOKENS]
                token, adapter = self.written[block, position % BLOCK_TOKENS]
                assert token == self.slots.tokens[slot, position]
                assert adapter == self.slots.adapter_index[slot]

    @invariant()
    def every_holder_is_counted(self) -> None:
        held = np.zeros(self.BLOCKS, int)
        for slot in range(self.SLOTS):
            for index in range(int(self.memory.blocks_per_slot[slot])):
                held[self.memory.block_table[slot, index]] += 1
        in_tree = self.memory.block_pool.ref_counts - held
        assert ((in_tree == 0) | (in_tree == 1)).all()
        assert in_tree.sum() == self.memory.prefix_cache.num_blocks
        assert (self.memory.block_pool.ref_counts == 0).sum() == self.memory.block_pool.num_free


TestMemory = Memory.TestCase


TestMemory.settings = settings(max_examples=60, stateful_step_count=30)


def cheapest(lengths: list[int]) -> int:
    """The least cost of all ways to cut the sorted rows where they need another context."""
    ordered = sorted(lengths)
    contexts = [BUCKETS.find_smallest(1, length).context for length in ordered]
    borders = [i for i in range(1, len(ordered)) if contexts[i] != contexts[i - 1]]
    costs = []
    for cuts in range(len(borders) + 1):
        for places in itertools.combinations(borders, cuts):
            runs = itertools.pairwise([0, *places, len(ordered)])
            costs.append(sum(BUCKETS.find_smallest(b - a, ordered[b - 1]).cost for a, b in runs))
    return min(costs)


@given(lengths=lengths_of)
def test_every_row_is_in_one_bucket_that_holds_it(lengths: list[int]) -> None:
    groups = BUCKETS.split(np.array(lengths))
    rows = [int(row) for _, chosen in groups for row in chosen]
    assert sorted(rows) == list(range(len(lengths)))
    for bucket, chosen in groups:
        assert len(chosen) <= bucket.lanes
        assert max(lengths[row] for row in chosen) <= bucket.context


@given(lengths=lengths_of)
@settings(max_examples=60)
def test_no_other_cut_costs_less(lengths: list[int]) -> None:
    found = sum(bucket.cost for bucket, _ in BUCKETS.split(np.array(lengths)))
    assert found <= cheapest(lengths)


def test_one_long_row_does_not_make_the_short_ones_long() -> None:
    groups = GraphBuckets(64, 32768).split(np.array([32000] + [200] * 63))
    assert [(b.lanes, b.context, len(rows)) for b, rows in groups] == [
        (64, 256, 63),
        (1, 32768, 1),
    ]


def test_shapes_are_few() -> None:
    buckets = GraphBuckets(512, 32768)
    assert len(buckets.lanes) * len(buckets.contexts) < 250
    assert max(b / a for a, b in itertools.pairwise(buckets.lanes)) <= 2


@pytest.mark.needs("compiler")
def test_requests_that_do_not_fit_together_give_way_and_are_computed_again() -> None:
    contexts = {i: words(i, 20 + 5 * i) for i in range(8)}
    asked = [request(i, context, max_new=60) for i, context in contexts.items()]
    roomy = Listener(built_in("native", slots=8)).run(*asked)
    engine = built_in("native", slots=8, kv_cache_tokens=14 * BLOCK_TOKENS)
    tight = Listener(engine).run(*asked)
    assert engine.num_preempted > 0
    for i, context in contexts.items():
        assert tight[i].tokens == roomy[i].tokens
        holds(tight[i], decoder(), context)


@pytest.mark.needs("compiler")
def test_under_pressure_the_oldest_request_ends_first() -> None:
    engine = built_in("native", slots=4, kv_cache_tokens=9 * BLOCK_TOKENS)
    listener = Listener(engine)
    engine.submit([request(i, words(i, 40), max_new=80) for i in range(4)])
    order: list[int] = []
    while engine.step():
        listener.drain()
        order += [i for i, h in listener.heard.items() if h.finish and i not in order]
    assert order == [0, 1, 2, 3]


@pytest.mark.rotating(3)
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("seed", range(12))
def test_whatever_shares_and_gives_way_every_token_is_right(seed: int) -> None:
    """Groups with few distinct prompts and equal seeds: blocks are shared, doubled and taken."""
    random = np.random.default_rng(seed)
    engine = built_in(
        "native", slots=6, kv_cache_tokens=(10 + seed) * BLOCK_TOKENS, steps=8, budget_s=60.0
    )
    listener = Listener(engine)
    contexts: dict[int, list[int]] = {}
    for id in range(24):
        contexts[id] = words(int(random.integers(3)), int(random.choice([5, 16, 33, 50])))
        engine.submit(
            [
                request(
                    id,
                    contexts[id],
                    max_new=int(random.integers(1, 70)),
                    seed=int(random.integers(3)),
                    temperature=float(random.choice([0.0, 1.0])),
                    session=int(random.integers(-1, 4)),
                )
            ]
        )
        for _ in range(int(random.integers(4))):
            engine.step()
    for id, heard in listener.run().items():
        holds(heard, decoder(), contexts[id])


@pytest.mark.needs("compiler")
def test_idle_sessions_give_way_before_requests_do() -> None:
    engine = built_in("native", slots=4, kv_cache_tokens=9 * BLOCK_TOKENS)
    listener = Listener(engine)
    context = words(1, 60)
    first = listener.run(request(1, context, session=5, max_new=4))[1].tokens
    listener.run(request(2, words(2, 60), max_new=60))
    assert engine.num_preempted == 0
    heard = listener.run(request(3, [*context, *first, 7], session=5, max_new=4))[3]
    holds(heard, decoder(), [*context, *first, 7])


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("steps", [1, 8])
def test_several_steps_in_a_call_give_the_same_tokens(steps: int) -> None:
    asked = [request(i, words(i, 7), max_new=5 + 3 * i, stop_ids=(3, 9)) for i in range(9)]
    one = Listener(built_in("native")).run(*asked)
    many = Listener(built_in("native", steps=steps, budget_s=60.0)).run(*asked)
    assert {i: h.tokens for i, h in one.items()} == {i: h.tokens for i, h in many.items()}
    assert {i: h.finish for i, h in one.items()} == {i: h.finish for i, h in many.items()}


def test_sleep_loses_no_token_and_waking_goes_on(make: Make) -> None:
    whole = Listener(make()).run(request(1, [4, 5], max_new=30, seed=3))[1].tokens
    engine = make()
    listener = Listener(engine)
    engine.submit([request(1, [4, 5], max_new=30, seed=3), *(request(i) for i in range(2, 9))])
    while engine.tokens_generated < 20:
        engine.step()
    engine.sleep()
    assert not engine.step()
    with pytest.raises(Refused, match="no weights"):
        engine.score(np.array([1, 2]))
    engine.wake(decoder().state_dict(), 1)
    heard = listener.run()
    assert heard[1].tokens == whole
    assert heard[1].versions == sorted(heard[1].versions) and heard[1].versions[-1] == 1
    assert all(len(heard[i].tokens) == 20 for i in range(2, 9))


def test_an_engine_without_weights_waits_for_them(make: Make) -> None:
    engine = make()
    engine.sleep()
    engine.submit([request(1)])
    assert not engine.step() and engine.num_waiting == 1
    engine.wake(decoder(1).state_dict(), 7)
    assert Listener(engine).run()[1].versions == [7] * 20


@pytest.mark.needs("compiler")
def test_scoring_makes_room_and_what_gave_way_goes_on() -> None:
    engine = built_in("native", slots=4, kv_cache_tokens=9 * BLOCK_TOKENS)
    engine.submit([request(i, words(i, 30), max_new=60) for i in range(4)])
    for _ in range(4):
        engine.step()
    scored = engine.score(np.array(words(9, 120)))
    assert scored.shape == (119,)
    heard = Listener(engine).run()
    for i in range(4):
        assert len(heard[i].tokens) == 60
        holds(heard[i], decoder(), words(i, 30))


def test_a_sequence_too_long_to_score_is_refused(make: Make) -> None:
    with pytest.raises(Refused, match="129 tokens"):
        make(max_length=128).score(np.array(words(1, 129)))


@pytest.mark.parametrize("odd", [{"path": "fast"}, {"dtype": "float16"}])
def test_an_unknown_path_or_type_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="there is no path"):
        built_in(**{"path": "auto", **odd})


@pytest.mark.needs("compiler")
def test_bfloat16_stays_near_float32() -> None:
    heard = Listener(built_in("native", dtype="bfloat16")).run(request(1, [4, 5], max_new=30))[1]
    scored = built_in("native").score(np.array([4, 5, *heard.tokens]))[1:]
    assert np.abs(np.array(heard.logprobs) - scored).max() < 0.25
    assert TINY.head_dim not in (32, 64, 128)  # heads are padded to a width that has kernels
