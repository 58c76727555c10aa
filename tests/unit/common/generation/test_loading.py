"""Prefixes loaded while they are computed: the output does not depend on the chunks that arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.generation.builtin.engine_builder import BuiltinEngine
from meshrl.common.generation.prefix_loading import (
    CHUNK_TOKENS,
    MIN_PREFIX_TOKENS,
    ChunkBytes,
    OffloadedPrefix,
    PrefixLoad,
    PrefixQuery,
)
from tests.unit.common.generation.engines_under_test import (
    BUILT_IN,
    Listener,
    ManualClock,
    built_in,
    decoder,
    request,
)
from tests.unit.common.generation.test_builtin_engine import assert_matches_model, words

pytestmark = pytest.mark.needs("compiler")

LENGTH = 1024


@dataclass
class ChunkPrefixStore:
    """Prefix store of one version, which delivers a chunk on request of the test."""

    clock: ManualClock
    chunks: dict[bytes, ChunkBytes] = field(default_factory=dict)
    loads: list[tuple[PrefixQuery, PrefixLoad]] = field(default_factory=list)
    released_sessions: list[int] = field(default_factory=list)

    def find_prefix(self, query: PrefixQuery) -> PrefixLoad | None:
        end = (len(query.tokens) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        load = PrefixLoad(query.num_computed_tokens, end, self.clock.monotonic())
        self.loads.append((query, load))
        return load

    def offload(self, prefix: OffloadedPrefix) -> None:
        for start in range(
            0,
            len(prefix.tokens) // CHUNK_TOKENS * CHUNK_TOKENS if prefix.is_single_version else 0,
            CHUNK_TOKENS,
        ):
            name = prefix.tokens[: start + CHUNK_TOKENS].tobytes()
            self.chunks.setdefault(name, prefix.read(start, start + CHUNK_TOKENS))

    def release_sessions(self, sessions: Sequence[int]) -> None:
        self.released_sessions += sessions

    def deliver(self, load_index: int, start: int) -> bool:
        """Deliver a chunk, if the store has it and the load needs it."""
        query, load = self.loads[load_index]
        content = self.chunks.get(query.tokens[: start + CHUNK_TOKENS].tobytes())
        if content is None or not load.needs_chunk(start) or start >= load.end:
            return False
        load.add_chunk(start, start + CHUNK_TOKENS, content)
        return True


def make_engine_with_store(
    path: str, slots: int = 4, **more: Any
) -> tuple[BuiltinEngine, ChunkPrefixStore]:
    clock = ManualClock()
    engine = built_in(path, slots, LENGTH, clock=clock, **more)
    engine.prefix_store = store = ChunkPrefixStore(clock)
    return engine, store


def clear_cache(engine: BuiltinEngine) -> None:
    """Clear the engine's cache by sleep and wake."""
    engine.sleep()
    engine.wake(decoder().state_dict(), engine.version)


@pytest.fixture(scope="module")
def engines() -> dict[str, tuple[BuiltinEngine, ChunkPrefixStore]]:
    return {path: make_engine_with_store(path) for path in BUILT_IN}


cases = given(
    path=st.sampled_from(BUILT_IN),
    length=st.integers(MIN_PREFIX_TOKENS + 1, 900),
    stored_tokens=st.integers(0, 900),
    shared=st.integers(0, 600),
    missing_chunks=st.sets(st.integers(0, 6)),
    chunks_per_step=st.integers(0, 6),
    max_chunks=st.integers(0, 9),
    order=st.sampled_from(("down", "up")),
    expected_s=st.sampled_from((0.0, 0.01, 1.0)),
    end_mode=st.sampled_from(("ends", "stays silent", "is cancelled")),
    seed=st.integers(0, 10**6),
)


def assert_output_is_independent_of_loads(
    engines: dict[str, tuple[BuiltinEngine, ChunkPrefixStore]],
    path: str,
    length: int,
    stored_tokens: int,
    shared: int,
    missing_chunks: set[int],
    chunks_per_step: int,
    max_chunks: int,
    order: str,
    expected_s: float,
    end_mode: str,
    seed: int,
) -> None:
    engine, store = engines[path]
    clear_cache(engine)
    store.chunks.clear()
    store.loads.clear()
    context = words(seed, length)
    expected = Listener(engine).run(request(1, context, max_new=3, temperature=0.0, seed=4))[1]
    if stored_tokens > MIN_PREFIX_TOKENS:  # a request that shares only a part of the prefix
        clear_cache(engine)
        store.chunks = {k: v for k, v in store.chunks.items() if len(k) // 4 <= stored_tokens}
    clear_cache(engine)
    if shared:  # the cache of another request in the engine itself
        Listener(engine).run(request(3, context[:shared], max_new=1, temperature=0.0))
    store.loads.clear()
    count_before = engine.tokens_computed
    listener = Listener(engine)
    engine.submit([request(2, context, max_new=3, temperature=0.0, seed=4)])
    delivered, steps, idle_steps = 0, 0, 0
    while not listener.get_output(2).finish:
        idle_steps = 0 if engine.step() else idle_steps + 1
        steps += 1
        store.clock.advance(0.01)
        listener.drain()
        if not store.loads:
            continue
        load = store.loads[0][1]
        load.expected_chunk_s = expected_s
        starts = range(0, load.end, CHUNK_TOKENS)
        for _ in range(chunks_per_step if delivered < max_chunks else 0):
            needed = [s for s in starts if s not in load.loaded_spans and load.needs_chunk(s)]
            needed = [s for s in needed if s // CHUNK_TOKENS not in missing_chunks]
            if needed and store.deliver(0, needed[-1] if order == "down" else needed[0]):
                delivered += 1
        if delivered >= max_chunks or (steps > 50 and not chunks_per_step):
            load.is_finished |= end_mode == "ends"
        if end_mode == "is cancelled" and delivered >= max_chunks:
            engine.abort([2])
            listener.drain()
            break
        assert steps < 400, "the engine waits for chunks that never arrive"
    output = listener.get_output(2)
    if end_mode == "is cancelled" and output.finish != expected.finish:
        assert not engine.num_running and not engine.scheduler.prefix_loads.active_loads
        return
    assert output.tokens == expected.tokens
    np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=1e-4)
    loaded = sum(load.num_skipped for _, load in store.loads)
    computed = engine.tokens_computed - count_before
    assert computed <= length + 2 - loaded
    assert shared or computed == length + 2 - loaded


@settings(max_examples=40)
@cases
def test_output_is_independent_of_loads(
    engines: dict[str, tuple[BuiltinEngine, ChunkPrefixStore]], **case: Any
) -> None:
    assert_output_is_independent_of_loads(engines, **case)


@pytest.mark.deep
@settings(max_examples=500)
@cases
def test_output_is_independent_of_loads_in_many_cases(
    engines: dict[str, tuple[BuiltinEngine, ChunkPrefixStore]], **case: Any
) -> None:
    assert_output_is_independent_of_loads(engines, **case)


@pytest.mark.parametrize("path", ["native", "graphs"])
def test_waiting_requests_do_not_block_loading_ones(path: str) -> None:
    """Check five requests in a cache for two, of which the first two load some chunks."""
    engine, store = make_engine_with_store(path, 6, kv_cache_tokens=2 * LENGTH)
    contexts = [words(i, 900) for i in range(5)]
    for i, context in enumerate(contexts):
        Listener(engine).run(request(i, context, max_new=1))
        clear_cache(engine)
    store.loads.clear()
    listener = Listener(engine)
    engine.submit([request(10 + i, c, max_new=4, session=i) for i, c in enumerate(contexts)])
    engine.step()
    for load_index, (_, load) in enumerate(store.loads[:2]):
        for start in (768, 640, 256):
            store.deliver(load_index, start)
        load.is_finished = True
    steps = 0
    while engine.num_running or engine.num_waiting:
        engine.step()
        listener.drain()
        for _, load in store.loads[2:]:
            load.is_finished = True
        steps += 1
        assert steps < 500, "requests wait for each other"
    for i, context in enumerate(contexts):
        assert_matches_model(listener.get_output(10 + i), decoder(), context)


@pytest.mark.rotating(8)
@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_correct_under_random_loads_and_eviction(seed: int) -> None:
    """Check conversations that share a prompt in a small cache, with random deliveries."""
    generator = np.random.default_rng(seed)
    engine, store = make_engine_with_store(
        "native", 4, kv_cache_tokens=LENGTH + 60 * seed, max_steps=4, step_budget_s=60.0
    )
    contexts = {session: words(session % 2, 600 + 50 * session) for session in range(5)}
    loaded_count = 0
    for turn in range(12):
        chosen = generator.choice(5, 3, replace=False).tolist()
        listener = Listener(engine)
        ids = {session: 100 * turn + session for session in chosen}
        store.loads.clear()
        engine.submit(
            [request(ids[s], contexts[s], session=s, max_new=int(generator.integers(1, 30)))
             for s in chosen]
        )  # fmt: skip
        steps = 0
        while engine.num_running or engine.num_waiting:
            engine.step()
            store.clock.advance(0.01)
            for load_index, (_, load) in enumerate(store.loads):
                load.expected_chunk_s = 0.02
                for start in range(768, 128, -CHUNK_TOKENS):
                    if generator.random() < 0.5:
                        store.deliver(load_index, start)
                load.is_finished |= generator.random() < 0.2
            listener.drain()
            steps += 1
            assert steps < 2000, "requests wait for each other"
        loaded_count += sum(load.num_skipped for _, load in store.loads)
        for session in chosen:
            output = listener.get_output(ids[session])
            assert_matches_model(output, decoder(), contexts[session])
            new_tokens = words(turn, 20)
            contexts[session] = [*contexts[session], *output.tokens, *new_tokens][:900]
    assert loaded_count >= CHUNK_TOKENS


@given(
    num_computed=st.integers(0, 2000),
    ahead=st.integers(0, 20),
    max_tokens=st.integers(1, 512),
    rate=st.sampled_from((0.0, 10.0, 1e3, 1e6)),
    expected_s=st.sampled_from((0.0, 1e-6, 0.01, 10.0)),
    silent_s=st.floats(0, 100),
)
def test_wait_for_chunks_is_bounded(
    num_computed: int, ahead: int, max_tokens: int, rate: float, expected_s: float, silent_s: float
) -> None:
    loaded_start = (num_computed // CHUNK_TOKENS + 1 + ahead) * CHUNK_TOKENS
    load = PrefixLoad(0, loaded_start + CHUNK_TOKENS, 0.0)
    load.loaded_spans[loaded_start], load.claimed_end, load.expected_chunk_s = (
        loaded_start + CHUNK_TOKENS,
        num_computed,
        expected_s,
    )
    count = load.plan_compute_tokens(num_computed, max_tokens, rate, silent_s)
    assert 0 <= count <= min(max_tokens, loaded_start - num_computed)
    needed_starts = [
        start for start in range(0, loaded_start, CHUNK_TOKENS) if load.needs_chunk(start)
    ]
    assert count or needed_starts
    if not count:
        assert silent_s <= CHUNK_TOKENS / rate, "computing a chunk would have been faster"
    if count < max_tokens:
        assert (num_computed + count) % CHUNK_TOKENS == 0
    load.is_finished = True
    assert load.plan_compute_tokens(num_computed, max_tokens, rate, silent_s) == min(
        max_tokens, loaded_start - num_computed
    )
