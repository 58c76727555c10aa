"""Moves of a session's cache between engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from meshrl.common.generation.batch.paged_cache import PagedCache
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine
from meshrl.common.generation.builtin.prefix_loads import MAX_OFFERED_LOADS
from meshrl.common.generation.builtin.scheduler import PrefillRate
from meshrl.common.generation.engine_contract import MIXED_VERSIONS, GenerationRequest, SessionCache
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS, CacheOrigin, PrefixLoad
from meshrl.common.job.memory.cache_blocks import BLOCK_TOKENS
from tests.unit.common.generation.engines_under_test import (
    BUILT_IN,
    PATHS,
    SCALE,
    CollectedOutput,
    Listener,
    adapter,
    built_in,
    decoder,
    request,
    with_adapter,
)
from tests.unit.common.generation.test_builtin_engine import (
    Make,
    assert_matches_model,
    expected_logprobs,
    make,
    words,
)

__all__ = ["make"]

SESSION = 3
NEEDS_COMPILER = pytest.mark.needs("compiler")


def run_first_turn(
    engine: BuiltinEngine, length: int = 20, new: int = 6, seed: int = 5
) -> list[int]:
    """Run a first turn of the session; return its context afterwards, with a tool's result."""
    context = words(seed, length)
    outputs = Listener(engine).run(request(1, context, session=SESSION, max_new=new, seed=9))
    return [*context, *outputs[1].tokens, 7, 8]


def next_turn(context: list[int], temperature: float = 1.0, **more: Any) -> GenerationRequest:
    return request(
        2, context, session=SESSION, seed=11, temperature=temperature, **{"max_new": 12, **more}
    )


def offer(
    cache: SessionCache,
    target: BuiltinEngine,
    is_front_first: bool | None = None,
    session: int = SESSION,
) -> PrefixLoad | None:
    """Offer a cache to the target and return its load; None if the target rejects it. `alone`:
    whether the load starts at the front, None: as the versions require.
    """
    load = PrefixLoad(0, len(cache.tokens), 0.0)
    load.origin = CacheOrigin(cache.first_sampled_index, cache.first_version)
    load.is_front_first = (
        cache.version != target.version if is_front_first is None else is_front_first
    )
    return load if target.offer_load(session, cache, load) else None


def start_load(
    source: BuiltinEngine, target: BuiltinEngine, is_front_first: bool | None = None
) -> PrefixLoad:
    """Offer the source's session to the target and return the load."""
    cache = source.describe_session_cache(SESSION)
    load = None if cache is None else offer(cache, target, is_front_first)
    assert load is not None
    return load


def add_chunks(
    source: BuiltinEngine, load: PrefixLoad, starts: Iterable[int], session: int = SESSION
) -> None:
    """Add chunks of the source to a load."""
    for start in starts:
        end = min(start + CHUNK_TOKENS, load.end)
        content = source.copy_session_cache(session, start, end)
        assert content is not None
        load.add_chunk(start, end, content)


def move(
    source: BuiltinEngine, target: BuiltinEngine, descending: bool = True, session: int = SESSION
) -> int:
    """Move all of a session and return the number of tokens."""
    cache = source.describe_session_cache(session)
    load = None if cache is None else offer(cache, target, session=session)
    if cache is None or load is None:
        return 0
    starts = list(range(0, load.end, CHUNK_TOKENS))
    add_chunks(
        source,
        load,
        reversed(starts) if descending and not load.is_front_first else starts,
        session,
    )
    load.is_finished = True
    return load.end


def run_and_count(engine: BuiltinEngine, turn: GenerationRequest) -> tuple[int, CollectedOutput]:
    count_before = engine.tokens_computed
    output = Listener(engine).run(turn)[turn.id]
    return engine.tokens_computed - count_before, output


@pytest.mark.rotating(4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [4, 9, 16, 70, 400])
@pytest.mark.parametrize("descending", [True, False])
def test_moved_session_continues_bit_identically(
    make: Make, length: int, temperature: float, descending: bool
) -> None:
    source, target = make(max_length=512), make(max_length=512)
    context = run_first_turn(source, length)
    cached = len(context) - 3  # all but the last sampled token and the tool's result
    assert move(source, target, descending) == cached
    turn = next_turn(context, temperature)
    computed, target_output = run_and_count(target, turn)
    assert computed == 3 + 11
    _, source_output = run_and_count(source, turn)
    assert (target_output.tokens, target_output.versions) == (
        source_output.tokens,
        source_output.versions,
    )
    assert target_output.logprobs == source_output.logprobs
    assert_matches_model(target_output, decoder(), context, temperature or 1.0)


@pytest.mark.parametrize("path", PATHS)
def test_bfloat16_sessions_move_bit_identically(path: str) -> None:
    source, target = (built_in(path, dtype="bfloat16") for _ in range(2))
    context = run_first_turn(source, 40)
    assert move(source, target) == len(context) - 3
    assert run_and_count(target, next_turn(context))[1].logprobs == (
        run_and_count(source, next_turn(context))[1].logprobs
    )


def test_moved_session_can_be_moved_again(make: Make) -> None:
    first, second, third = make(), make(), make()
    context = run_first_turn(first, 33)
    assert move(first, second) == len(context) - 3
    output = Listener(second).run(next_turn(context))[2]
    context = [*context, *output.tokens, 9]
    assert move(second, third) == len(context) - 2
    moved_output = Listener(third).run(next_turn(context, 0.0))[2]
    assert_matches_model(moved_output, decoder(), context)


def test_target_serves_other_requests_beside_a_moved_session(make: Make) -> None:
    source, target = make(), make()
    context = run_first_turn(source, 40)
    others = {i: words(i, 9 + i) for i in range(10, 13)}
    target.submit([request(i, tokens, max_new=40) for i, tokens in others.items()])
    for _ in range(4):
        target.step()
    assert move(source, target) == len(context) - 3
    outputs = Listener(target).run(next_turn(context))
    assert_matches_model(outputs[2], decoder(), context)
    for i, tokens in others.items():
        assert_matches_model(outputs[i], decoder(), tokens)


@pytest.mark.rotating(3)
@NEEDS_COMPILER
@pytest.mark.parametrize("source", BUILT_IN)
@pytest.mark.parametrize("target", BUILT_IN)
def test_cache_of_another_layout_is_rejected(source: str, target: str) -> None:
    if source != target:
        from_, to = built_in(source), built_in(target)
        context = run_first_turn(from_)
        assert move(from_, to) == 0
        assert_matches_model(Listener(to).run(next_turn(context))[2], decoder(), context)
    narrow = built_in("native", dtype="bfloat16")
    run_first_turn(narrow)
    assert move(narrow, built_in("native")) == 0


def test_running_and_unknown_sessions_are_not_described(make: Make) -> None:
    engine = make()
    assert engine.describe_session_cache(SESSION) is None
    engine.submit([request(1, words(1, 30), session=SESSION)])
    engine.step()
    assert engine.describe_session_cache(SESSION) is None
    Listener(engine).run()
    assert engine.describe_session_cache(SESSION) is not None
    engine.release_sessions([SESSION])
    assert engine.describe_session_cache(SESSION) is None


# -- versions ------------------------------------------------------------------------------------


@pytest.mark.rotating(3)
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_cache_of_older_weights_is_accepted_only_in_keep_mode(make: Make, mode: str) -> None:
    """Check against an engine that had the session before the new weights."""
    source, target, reference = (make(kv_on_update=mode) for _ in range(3))
    context = run_first_turn(source, 20)
    run_first_turn(reference, 20)
    for engine in (target, reference):
        engine.update_weights(decoder(1).state_dict(), 1)
    moved_count = move(source, target)
    assert moved_count == (len(context) - 3 if mode == "keep" else 0)
    target_output = Listener(target).run(next_turn(context))[2]
    reference_output = Listener(reference).run(next_turn(context))[2]
    assert target_output.versions == reference_output.versions == [1] * 12
    assert target_output.tokens == reference_output.tokens
    np.testing.assert_allclose(target_output.logprobs, reference_output.logprobs, atol=2e-4)


def test_mixed_cache_moves_as_mixed_and_is_not_shared(make: Make) -> None:
    source, target = make(), make()
    context = run_first_turn(source, 40)
    source.update_weights(decoder(1).state_dict(), 1)
    output = Listener(source).run(next_turn(context))[2]
    context = [*context, *output.tokens, 9]
    target.update_weights(decoder(1).state_dict(), 1)
    cache = source.describe_session_cache(SESSION)
    assert cache is not None and cache.version == MIXED_VERSIONS and cache.first_version == 0
    assert move(source, target) == len(context) - 2
    Listener(target).run(next_turn(context))
    assert target.describe_session_cache(SESSION).version == MIXED_VERSIONS  # type: ignore[union-attr]
    separate_output = Listener(target).run(request(5, context[:45], max_new=4))[5]
    assert_matches_model(separate_output, decoder(1), context[:45])


def test_cache_newer_than_the_target_is_rejected(make: Make) -> None:
    """Check that a first token of the target's own version is no proof of older weights."""
    source, target = make(), make()
    run_first_turn(source, 20)
    source.update_weights(decoder(1).state_dict(), 1)
    assert move(source, target) == 0


def test_cache_without_a_sampled_token_of_its_version_is_rejected(make: Make) -> None:
    source, target = make(), make()
    cache = run_and_describe(source, 20)
    target.update_weights(decoder(1).state_dict(), 1)
    unsampled = replace(cache, first_sampled_index=len(cache.tokens))
    assert offer(unsampled, target) is None
    relabelled = replace(cache, first_version=1)  # recomputed under version 0 after a swap back
    assert offer(relabelled, target) is None
    assert offer(cache, target, is_front_first=False) is None, "old and new blocks would not match"
    assert offer(cache, target) is not None


def run_and_describe(engine: BuiltinEngine, length: int) -> SessionCache:
    run_first_turn(engine, length)
    cache = engine.describe_session_cache(SESSION)
    assert cache is not None
    return cache


def test_target_keeps_a_moved_cache_over_a_swap(make: Make) -> None:
    source, target = make(), make()
    context = run_first_turn(source, 20)
    assert move(source, target)
    target.submit([next_turn(context)])
    target.step()
    for engine in (source, target):
        engine.update_weights(decoder(1).state_dict(), 1)
    count_before = target.tokens_computed
    output = Listener(target).run()[2]
    assert target.tokens_computed - count_before < len(context)
    assert set(output.versions) <= {0, 1}


def test_pending_load_is_cancelled_by_a_swap(make: Make) -> None:
    source, target = make(max_length=512), make(max_length=512)
    context = run_first_turn(source, 300)
    load = start_load(source, target)
    target.submit([next_turn(context)])
    add_chunks(source, load, [256])
    target.step()
    target.update_weights(decoder(1).state_dict(), 1)
    assert load.is_cancelled
    add_chunks(source, load, [128, 0])
    assert_matches_model(Listener(target).run()[2], decoder(1), context)


@pytest.mark.parametrize("next_tokens", [[], [0]])
def test_session_that_lost_its_only_sampled_token_is_recomputed(
    make: Make, next_tokens: list[int]
) -> None:
    engine = make()
    context = words(5, 40)
    outputs = Listener(engine).run(request(1, context, session=SESSION, max_new=1))
    assert outputs[1].tokens != [0]
    engine.update_weights(decoder(1).state_dict(), 1)
    context += next_tokens
    assert_matches_model(
        Listener(engine).run(request(2, context, session=SESSION, max_new=5))[2],
        decoder(1),
        context,
    )


# -- cache space ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_moved_session_takes_only_the_space_of_its_request(path: str) -> None:
    """Check that idle sessions are evicted for the request, and running requests are not."""
    source, target = built_in(path), built_in(path, slots=4, kv_cache_tokens=9 * BLOCK_TOKENS)
    context = run_first_turn(source, 60)
    Listener(target).run(request(20, words(20, 30), session=20, max_new=2))
    target.submit([request(i, words(i, 30), max_new=30) for i in (10, 11)])
    for _ in range(8):
        target.step()
    assert move(source, target) == len(context) - 3
    assert target.describe_session_cache(20) is not None, "nothing is evicted before the request"
    outputs = Listener(target).run(next_turn(context))
    assert target.describe_session_cache(20) is None
    for i in (10, 11):
        assert_matches_model(outputs[i], decoder(), words(i, 30))
    assert_matches_model(outputs[2], decoder(), context)


def test_session_too_long_for_the_target_is_rejected(make: Make) -> None:
    source, target = make(), make(max_length=64)
    run_first_turn(source, 60)
    assert move(source, target) == 0


@pytest.mark.rotating(3)
@pytest.mark.parametrize("chunks", [[], [256], [384, 256], [128], [0, 384]])
def test_interrupted_move_keeps_the_received_chunks(make: Make, chunks: list[int]) -> None:
    source, target = make(max_length=512), make(max_length=512)
    context = run_first_turn(source, 420)
    load = start_load(source, target)
    add_chunks(source, load, chunks)
    load.is_finished = True
    computed, output = run_and_count(target, next_turn(context))
    received_count = sum(min(CHUNK_TOKENS, load.end - start) for start in chunks)
    assert computed == len(context) - received_count + 11
    assert_matches_model(output, decoder(), context)


def test_malformed_chunks_are_ignored(make: Make) -> None:
    source, target = make(max_length=512), make(max_length=512)
    context = run_first_turn(source, 300)
    load, content = start_load(source, target), source.copy_session_cache(SESSION, 128, 256)
    assert content is not None
    load.add_chunk(128, 256, content[:-16])
    load.add_chunk(512, 640, content)
    load.is_finished = True
    computed, output = run_and_count(target, next_turn(context))
    assert computed == len(context) + 11
    assert_matches_model(output, decoder(), context)


@pytest.mark.parametrize("path", PATHS)
def test_tokens_beyond_the_request_are_not_written(path: str) -> None:
    """Check a source that has computed a turn which the request does not have."""
    source, target = (built_in(path, max_length=512, kv_cache_tokens=1024) for _ in range(2))
    context = words(5, 260)
    first_tokens = (
        Listener(source).run(request(1, context, session=SESSION, max_new=90, seed=9))[1].tokens
    )
    others = {i: words(i, 100) for i in range(10, 13)}
    target.submit([request(i, tokens, max_new=20) for i, tokens in others.items()])
    target.step()
    assert move(source, target) > len(context) + 4 * BLOCK_TOKENS
    context += first_tokens[:5]
    outputs = Listener(target).run(request(2, context, session=SESSION, max_new=4))
    assert_matches_model(outputs[2], decoder(), context)
    for i, tokens in others.items():
        assert_matches_model(outputs[i], decoder(), tokens)


def test_unsampled_cache_is_dropped_with_its_weights(make: Make) -> None:
    """Check a cache that was lost in the middle of its prompt, before a token was sampled."""
    source, target = make(max_length=1024), make(max_length=1024)
    prompt = words(5, 1000)
    Listener(source).run(request(1, prompt[:300], session=SESSION, max_new=1))
    cache = source.describe_session_cache(SESSION)
    assert cache is not None
    load = offer(replace(cache, first_sampled_index=300, first_version=0), target)
    assert load is not None
    load.end = 300
    target.submit([request(2, prompt, session=SESSION, max_new=4, temperature=0.0)])
    add_chunks(source, load, [0, 128, 256])
    load.is_finished = True
    target.step()
    target.update_weights(decoder(1).state_dict(), 1)
    assert_matches_model(Listener(target).run()[2], decoder(1), prompt)


@pytest.mark.parametrize("path", PATHS)
def test_aborted_request_releases_the_space_of_its_load(path: str) -> None:
    source, target = built_in(path, max_length=512), built_in(path, max_length=512)
    context = run_first_turn(source, 300)
    load = start_load(source, target)
    load.expected_chunk_s, load._last_received_s = 1e-9, target._clock.monotonic()
    target.scheduler.prefill_rate.add_step(1000, 1000, 1.0)
    target.submit([next_turn(context)])
    target.step()
    cache = target._paged_cache
    assert isinstance(cache, PagedCache) and cache.block_pool.num_free < cache.block_pool.num_blocks
    target.abort([2])
    assert cache.block_pool.num_free == cache.block_pool.num_blocks and load.is_cancelled


def test_load_of_an_adapters_previous_version_is_cancelled(make: Make) -> None:
    source, target = make(), make()
    for engine in (source, target):
        engine.load_adapter("a", adapter(1), SCALE, 10)
    context = words(5, 60)
    first_request = request(1, context, session=SESSION, max_new=3, adapter="a")
    tokens = Listener(source).run(first_request)[1].tokens
    load = start_load(source, target, is_front_first=False)
    add_chunks(source, load, [0])
    target.load_adapter("a", adapter(2), SCALE, 11)
    assert load.is_cancelled
    context = [*context, *tokens, 7]
    outputs = Listener(target).run(request(2, context, session=SESSION, max_new=3, adapter="a"))
    assert_matches_model(outputs[2], with_adapter(adapter(2)), context)


def test_moved_cache_with_other_tokens_is_not_used(make: Make) -> None:
    source, target = make(), make()
    cache = run_and_describe(source, 60)
    other = [*words(6, 60), *cache.tokens[60:].tolist(), 3, 7, 8]
    assert move(source, target)
    computed, output = run_and_count(target, next_turn(other))
    assert computed == len(other) + 11
    assert_matches_model(output, decoder(), other)


def test_released_session_cancels_its_load(make: Make) -> None:
    source, target = make(), make()
    run_first_turn(source, 20)
    load = start_load(source, target)
    target.release_sessions([SESSION])
    assert load.is_cancelled and not load.needs_chunk(0)


def test_oldest_unused_loads_are_cancelled(make: Make) -> None:
    source, target = make(), make()
    cache = run_and_describe(source, 20)
    loads = [offer(cache, target, session=i) for i in range(MAX_OFFERED_LOADS + 2)]
    cancelled = [load is not None and load.is_cancelled for load in loads]
    assert cancelled == [True, True] + [False] * MAX_OFFERED_LOADS


def test_cache_that_arrives_after_its_request_is_used(make: Make) -> None:
    source, target = make(max_length=1024), make(max_length=1024)
    context = run_first_turn(source, 900)
    target.submit([next_turn(context)])
    target.step()
    count_before = target.tokens_computed
    assert move(source, target) == len(context) - 3
    output = Listener(target).run()[2]
    assert target.tokens_computed - count_before <= 11 + 3 + CHUNK_TOKENS
    assert_matches_model(output, decoder(), context)


def test_sleeping_engine_neither_exports_nor_accepts_caches(make: Make) -> None:
    source, target = make(), make()
    cache = run_and_describe(source, 20)
    target.sleep()
    assert offer(cache, target) is None
    source.sleep()
    assert (
        source.describe_session_cache(SESSION) is None
        and source.copy_session_cache(SESSION, 0, 1) is None
    )


@pytest.mark.parametrize("path", PATHS)
def test_moved_group_shares_its_prompt(path: str) -> None:
    source, target = built_in(path, slots=8), built_in(path, slots=8)
    prompt = words(5, 64)
    requests = [request(i, prompt, session=i, max_new=3) for i in range(4)]
    outputs = Listener(source).run(*requests)
    cache = target._paged_cache
    assert isinstance(cache, PagedCache)
    for i in range(4):
        assert move(source, target, session=i)
        context = [*prompt, *outputs[i].tokens, 7]
        listener = Listener(target)
        assert_matches_model(
            listener.run(request(9, context, session=i, max_new=4))[9], decoder(), context
        )
    assert cache.block_pool.num_blocks - cache.block_pool.num_free == 4 + 4, (
        "the prompt once, and the own tokens of each"
    )
    target.release_sessions(range(4))
    assert (
        cache.block_pool.ref_counts <= 1
    ).all() and cache.block_pool.num_free + cache.prefix_cache.num_blocks == (
        cache.block_pool.num_blocks
    )


@pytest.mark.rotating(3)
@NEEDS_COMPILER
@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_correct_under_moves_and_eviction(seed: int) -> None:
    """Move sessions at random between two engines with little cache."""
    generator = np.random.default_rng(seed)
    engines = [
        built_in(
            "native",
            slots=4,
            kv_cache_tokens=(10 + seed) * BLOCK_TOKENS,
            max_steps=4,
            step_budget_s=60.0,
        )
        for _ in range(2)
    ]
    contexts = {session: words(session % 3, 20 + 9 * session) for session in range(5)}
    engine_index = dict.fromkeys(contexts, 0)
    move_count = 0
    for turn in range(40):
        session = int(generator.integers(5))
        if generator.random() < 0.6:
            source, engine_index[session] = (
                engines[engine_index[session]],
                1 - engine_index[session],
            )
            move_count += bool(move(source, engines[engine_index[session]], session=session))
        engine = engines[engine_index[session]]
        other_request = request(
            1000 + turn, words(turn, 17), max_new=int(generator.integers(1, 40))
        )
        context = contexts[session]
        outputs = Listener(engine).run(
            request(turn, context, session=session, max_new=int(generator.integers(1, 6))),
            other_request,
        )
        assert_matches_model(outputs[turn], decoder(), context)
        assert_matches_model(outputs[1000 + turn], decoder(), words(turn, 17))
        contexts[session] = [*context, *outputs[turn].tokens, int(generator.integers(30))][:100]
    assert move_count > 5


# -- measured costs ------------------------------------------------------------------------------


def test_prefill_rate_is_that_of_long_steps() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s == 0.0
    for _ in range(20):
        rate.add_step(512, 512, 0.1)
        rate.add_step(3, 30, 0.05)  # a short tool result beside a decoding batch
    assert 0.9 * 5120 < rate.tokens_per_s <= 5120
    for _ in range(80):
        rate.add_step(512, 512, 0.2)
    assert abs(rate.tokens_per_s - 2560) < 100


def test_engine_reports_prefill_rate_and_cache_size(make: Callable[..., BuiltinEngine]) -> None:
    clock = TickingClock()
    engine = partial(make, max_length=700, slots=2)(clock=clock)
    assert engine.prefill_tokens_per_s == 0.0
    Listener(engine).run(request(1, words(1, 600), max_new=1, session=SESSION))
    assert engine.prefill_tokens_per_s > 0
    content = engine.copy_session_cache(SESSION, 0, 600)
    assert content is not None and len(content) >= 600 * engine.cache_bytes_per_token
    assert len(content) < (600 + BLOCK_TOKENS) * engine.cache_bytes_per_token


class TickingClock:
    """Clock that advances by a millisecond per reading."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.001
        return self.now_s

    wall = monotonic


def test_logprobs_after_a_move_are_those_of_the_model(make: Make) -> None:
    source, target = make(), make()
    context = run_first_turn(source, 30)
    move(source, target)
    output = Listener(target).run(next_turn(context))[2]
    np.testing.assert_allclose(
        output.logprobs, expected_logprobs(decoder(), context, output.tokens), atol=2e-4
    )
