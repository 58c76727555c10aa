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
from meshrl.common.generation.batch.blocks import BlockPool, PrefixCache
from meshrl.common.generation.batch.paged_cache import PagedCache
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.job.memory.cache_blocks import BLOCK_TOKENS
from tests.unit.common.generation.engines_under_test import (
    TINY,
    Listener,
    built_in,
    decoder,
    request,
)
from tests.unit.common.generation.test_builtin_engine import Make, assert_matches_model, make, words

tokens_of = st.lists(st.integers(0, 1), max_size=5 * BLOCK_TOKENS).map(
    lambda t: np.array(t, np.int64)
)
SLOTS, LENGTH = 48, 5000
BUCKETS = GraphBuckets(SLOTS, LENGTH)
lengths_of = st.lists(st.integers(1, LENGTH), min_size=1, max_size=SLOTS)
__all__ = ["make"]


def count_reusable_tokens(known: np.ndarray, queried: np.ndarray) -> int:
    """Return how many tokens of `asked` can be reused: whole blocks, and part of the last partial
    one.
    """
    n = min(len(known), len(queried))
    same = known[:n] == queried[:n]
    common = n if same.all() else int(same.argmin())
    in_tail = common // BLOCK_TOKENS == len(known) // BLOCK_TOKENS
    return common if in_tail else common // BLOCK_TOKENS * BLOCK_TOKENS


@settings(max_examples=100)
@given(inserted=st.lists(tokens_of, max_size=6), queried=tokens_of)
def test_longest_cached_prefix_is_matched(inserted: list[np.ndarray], queried: np.ndarray) -> None:
    pool = BlockPool(200)
    cache = PrefixCache(pool)
    block_tokens: dict[int, np.ndarray] = {}  # block -> the sequence's tokens up to its end
    for sequence in inserted:
        blocks = np.array(
            [pool.allocate() for _ in range(-(-len(sequence) // BLOCK_TOKENS))], np.int32
        )
        for i, block in enumerate(blocks.tolist()):
            block_tokens[block] = sequence[: (i + 1) * BLOCK_TOKENS]
        cache.insert(sequence, blocks, include_tail=True)
    match = cache.match(queried)
    assert match.num_tokens == max(
        (count_reusable_tokens(sequence, queried) for sequence in inserted), default=0
    )
    for i, block in enumerate(match.blocks):
        assert np.array_equal(block_tokens[block], queried[: (i + 1) * BLOCK_TOKENS])
    if match.num_tail_tokens:
        copied = block_tokens[match.tail_block][len(match.blocks) * BLOCK_TOKENS :]
        start = len(match.blocks) * BLOCK_TOKENS
        assert np.array_equal(
            copied[: match.num_tail_tokens], queried[start : start + match.num_tail_tokens]
        )


def test_least_recently_used_leaf_blocks_are_evicted_first() -> None:
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
    """Random operations on slots, with and without an adapter, against a model of their blocks. The
    model of the cache records for each position of each block the token and the adapter that it
    was written for.
    """

    SLOTS, LENGTH, BLOCKS = 4, 4 * BLOCK_TOKENS, 11

    @initialize()
    def start(self) -> None:
        self.slots = Slots(self.SLOTS, self.LENGTH)
        self.written = np.full((self.BLOCKS, BLOCK_TOKENS, 2), -1)
        self.memory = PagedCache(self.slots, self.copy)
        self.memory.resize(self.BLOCKS)
        self.slots.weights_ids[1] = self.last_weights_id = 1

    def copy(self, source: int, target: int) -> None:
        self.written[target] = self.written[source]

    @rule(
        slot=st.integers(0, 3),
        tokens=tokens_of,
        kept_count=st.integers(0, 4 * BLOCK_TOKENS),
        adapter=st.integers(0, 1),
    )
    def fill_slot(self, slot: int, tokens: np.ndarray, kept_count: int, adapter: int) -> None:
        """Place a request whose first tokens may be those of the slot."""
        if self.slots.adapter_index[slot] != adapter:
            self.slots.adapter_index[slot], self.slots.num_computed_tokens[slot] = adapter, 0
        computed_count = int(self.slots.num_computed_tokens[slot])
        kept_count = min(kept_count, computed_count)
        all_tokens = np.concatenate((self.slots.tokens[slot, :kept_count], tokens, [0, 1]))[
            : self.LENGTH - 1
        ]
        self.slots.tokens[slot, : len(all_tokens)] = all_tokens
        self.slots.num_tokens[slot] = len(all_tokens)
        self.slots.num_computed_tokens[slot] = min(kept_count, len(all_tokens) - 1)
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
            entry = self.slots.tokens[slot, position], self.slots.adapter_index[slot]
            self.written[block, position % BLOCK_TOKENS] = entry
        self.slots.num_computed_tokens[slot] = end
        self.memory.publish_prefix(slot, include_tail=end % 2 == 0)

    @rule(slot=st.integers(0, 3))
    def free(self, slot: int) -> None:
        self.memory.free_slot(slot)
        self.slots.num_tokens[slot] = 0

    @rule()
    def swap(self) -> None:
        self.slots.weights_ids[:2] = self.last_weights_id + 1, self.last_weights_id + 2
        self.last_weights_id += 2
        self.memory.clear_prefixes()

    @rule()
    def load(self) -> None:
        """Load a new version of the adapter."""
        self.last_weights_id += 1
        self.slots.weights_ids[1] = self.last_weights_id

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
        reference_counts = np.zeros(self.BLOCKS, int)
        for slot in range(self.SLOTS):
            for index in range(int(self.memory.blocks_per_slot[slot])):
                reference_counts[self.memory.block_table[slot, index]] += 1
        in_tree = self.memory.block_pool.ref_counts - reference_counts
        assert ((in_tree == 0) | (in_tree == 1)).all()
        assert in_tree.sum() == self.memory.prefix_cache.num_blocks
        assert (self.memory.block_pool.ref_counts == 0).sum() == self.memory.block_pool.num_free


TestMemory = Memory.TestCase


TestMemory.settings = settings(max_examples=40, stateful_step_count=20)


def compute_cheapest_split(lengths: list[int]) -> int:
    """Return the least cost of all splits of the sorted rows between different contexts."""
    ordered = sorted(lengths)
    contexts = [BUCKETS.find_smallest(1, length).context for length in ordered]
    borders = [i for i in range(1, len(ordered)) if contexts[i] != contexts[i - 1]]
    costs = []
    for cuts in range(len(borders) + 1):
        for boundaries in itertools.combinations(borders, cuts):
            spans = itertools.pairwise([0, *boundaries, len(ordered)])
            costs.append(sum(BUCKETS.find_smallest(b - a, ordered[b - 1]).cost for a, b in spans))
    return min(costs)


@given(lengths=lengths_of)
def test_every_row_is_in_one_bucket_of_sufficient_size(lengths: list[int]) -> None:
    groups = BUCKETS.split(np.array(lengths))
    rows = [int(row) for _, chosen in groups for row in chosen]
    assert sorted(rows) == list(range(len(lengths)))
    for bucket, chosen in groups:
        assert len(chosen) <= bucket.lanes
        assert max(lengths[row] for row in chosen) <= bucket.context


@given(lengths=lengths_of)
@settings(max_examples=60)
def test_split_has_the_least_cost(lengths: list[int]) -> None:
    cost = sum(bucket.cost for bucket, _ in BUCKETS.split(np.array(lengths)))
    assert cost <= compute_cheapest_split(lengths)


def test_long_row_is_split_from_short_ones() -> None:
    groups = GraphBuckets(64, 32768).split(np.array([32000] + [200] * 63))
    assert [(b.lanes, b.context, len(rows)) for b, rows in groups] == [
        (64, 256, 63),
        (1, 32768, 1),
    ]


def test_number_of_shapes_is_small() -> None:
    buckets = GraphBuckets(512, 32768)
    assert len(buckets.lanes) * len(buckets.contexts) < 250
    assert max(b / a for a, b in itertools.pairwise(buckets.lanes)) <= 2


@pytest.mark.needs("compiler")
def test_preempted_requests_are_recomputed_with_the_same_tokens() -> None:
    contexts = {i: words(i, 20 + 5 * i) for i in range(8)}
    requests = [request(i, context, max_new=60) for i, context in contexts.items()]
    expected = Listener(built_in("native", slots=8)).run(*requests)
    engine = built_in("native", slots=8, kv_cache_tokens=14 * BLOCK_TOKENS)
    outputs = Listener(engine).run(*requests)
    assert engine.num_preempted > 0
    for i, context in contexts.items():
        assert outputs[i].tokens == expected[i].tokens
        assert_matches_model(outputs[i], decoder(), context)


@pytest.mark.needs("compiler")
def test_oldest_request_finishes_first_under_pressure() -> None:
    engine = built_in("native", slots=4, kv_cache_tokens=9 * BLOCK_TOKENS)
    listener = Listener(engine)
    engine.submit([request(i, words(i, 40), max_new=80) for i in range(4)])
    order: list[int] = []
    while engine.step():
        listener.drain()
        order += [i for i, h in listener.outputs.items() if h.finish and i not in order]
    assert order == [0, 1, 2, 3]


@pytest.mark.rotating(3)
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_correct_under_sharing_and_eviction(seed: int) -> None:
    """Check groups with few prompts and equal seeds, whose blocks are shared, copied and
    evicted.
    """
    generator = np.random.default_rng(seed)
    engine = built_in(
        "native",
        slots=6,
        kv_cache_tokens=(10 + seed) * BLOCK_TOKENS,
        max_steps=8,
        step_budget_s=60.0,
    )
    listener = Listener(engine)
    contexts: dict[int, list[int]] = {}
    for id in range(24):
        contexts[id] = words(int(generator.integers(3)), int(generator.choice([5, 16, 33, 50])))
        engine.submit(
            [
                request(
                    id,
                    contexts[id],
                    max_new=int(generator.integers(1, 70)),
                    seed=int(generator.integers(3)),
                    temperature=float(generator.choice([0.0, 1.0])),
                    session=int(generator.integers(-1, 4)),
                )
            ]
        )
        for _ in range(int(generator.integers(4))):
            engine.step()
    for id, output in listener.run().items():
        assert_matches_model(output, decoder(), contexts[id])


@pytest.mark.needs("compiler")
def test_idle_sessions_are_evicted_before_requests() -> None:
    engine = built_in("native", slots=4, kv_cache_tokens=9 * BLOCK_TOKENS)
    listener = Listener(engine)
    context = words(1, 60)
    first = listener.run(request(1, context, session=5, max_new=4))[1].tokens
    listener.run(request(2, words(2, 60), max_new=60))
    assert engine.num_preempted == 0
    output = listener.run(request(3, [*context, *first, 7], session=5, max_new=4))[3]
    assert_matches_model(output, decoder(), [*context, *first, 7])


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("steps", [1, 8])
def test_several_steps_per_call_give_the_same_tokens(steps: int) -> None:
    requests = [request(i, words(i, 7), max_new=5 + 3 * i, stop_ids=(3, 9)) for i in range(9)]
    single_step = Listener(built_in("native")).run(*requests)
    multi_step = Listener(built_in("native", max_steps=steps, step_budget_s=60.0)).run(*requests)
    assert {i: h.tokens for i, h in single_step.items()} == {
        i: h.tokens for i, h in multi_step.items()
    }
    assert {i: h.finish for i, h in single_step.items()} == {
        i: h.finish for i, h in multi_step.items()
    }


def test_sleep_loses_no_token_and_wake_continues(make: Make) -> None:
    expected = Listener(make()).run(request(1, [4, 5], max_new=30, seed=3))[1].tokens
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
    outputs = listener.run()
    assert outputs[1].tokens == expected
    assert outputs[1].versions == sorted(outputs[1].versions) and outputs[1].versions[-1] == 1
    assert all(len(outputs[i].tokens) == 20 for i in range(2, 9))


def test_engine_without_weights_waits_for_them(make: Make) -> None:
    engine = make()
    engine.sleep()
    engine.submit([request(1)])
    assert not engine.step() and engine.num_waiting == 1
    engine.wake(decoder(1).state_dict(), 7)
    assert Listener(engine).run()[1].versions == [7] * 20


@pytest.mark.needs("compiler")
def test_scoring_preempts_requests_that_continue_later() -> None:
    engine = built_in("native", slots=4, kv_cache_tokens=9 * BLOCK_TOKENS)
    engine.submit([request(i, words(i, 30), max_new=60) for i in range(4)])
    for _ in range(4):
        engine.step()
    scored = engine.score(np.array(words(9, 120)))
    assert scored.shape == (119,)
    outputs = Listener(engine).run()
    for i in range(4):
        assert len(outputs[i].tokens) == 60
        assert_matches_model(outputs[i], decoder(), words(i, 30))


def test_sequence_too_long_to_score_is_rejected(make: Make) -> None:
    with pytest.raises(Refused, match="129 tokens"):
        make(max_length=128).score(np.array(words(1, 129)))


@pytest.mark.parametrize("options", [{"path": "fast"}, {"dtype": "float16"}])
def test_unknown_backend_or_dtype_is_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="there is no backend"):
        built_in(**{"path": "auto", **options})


@pytest.mark.needs("compiler")
def test_bfloat16_logprobs_stay_near_float32() -> None:
    output = Listener(built_in("native", dtype="bfloat16")).run(request(1, [4, 5], max_new=30))[1]
    scored = built_in("native").score(np.array([4, 5, *output.tokens]))[1:]
    assert np.abs(np.array(output.logprobs) - scored).max() < 0.25
    assert TINY.head_dim not in (32, 64, 128)  # heads are padded to a width with kernels
