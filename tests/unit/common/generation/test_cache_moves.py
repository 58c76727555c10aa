"""A session goes on at another engine as it would have where it was; what is unsure is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from meshrl.common.generation.batch.blocks import BLOCK_TOKENS
from meshrl.common.generation.batch.paged_cache import PagedCache
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine
from meshrl.common.generation.builtin.prefix_loads import MAX_OFFERED_LOADS
from meshrl.common.generation.builtin.scheduler import PrefillRate
from meshrl.common.generation.engine_contract import MIXED_VERSIONS, GenerationRequest, SessionCache
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS, CacheOrigin, PrefixLoad
from tests.unit.common.generation.engines_under_test import (
    BUILT_IN,
    SCALE,
    Heard,
    Listener,
    adapter,
    built_in,
    decoder,
    request,
    with_adapter,
)
from tests.unit.common.generation.test_builtin_engine import (
    Make,
    expected_logprobs,
    holds,
    make,
    words,
)

__all__ = ["make"]

SESSION = 3
NATIVE = pytest.mark.needs("compiler")


def begun(engine: BuiltinEngine, length: int = 20, new: int = 6, seed: int = 5) -> list[int]:
    """A first turn of the session; its context afterwards, with a tool's result."""
    context = words(seed, length)
    heard = Listener(engine).run(request(1, context, session=SESSION, max_new=new, seed=9))
    return [*context, *heard[1].tokens, 7, 8]


def next_turn(context: list[int], temperature: float = 1.0, **more: Any) -> GenerationRequest:
    return request(
        2, context, session=SESSION, seed=11, temperature=temperature, **{"max_new": 12, **more}
    )


def offered(
    cache: SessionCache, target: BuiltinEngine, alone: bool | None = None, session: int = SESSION
) -> PrefixLoad | None:
    """What the target is to load; None: it must not. `alone`: None where its version says so."""
    load = PrefixLoad(0, len(cache.tokens), 0.0)
    load.origin = CacheOrigin(cache.first_sampled_index, cache.first_version)
    load.is_front_first = cache.version != target.version if alone is None else alone
    return load if target.offer_load(session, cache, load) else None


def loading(source: BuiltinEngine, target: BuiltinEngine, alone: bool | None = None) -> PrefixLoad:
    """What the target is to load of the session that the source has."""
    cache = source.describe_session_cache(SESSION)
    load = None if cache is None else offered(cache, target, alone)
    assert load is not None
    return load


def brought(
    source: BuiltinEngine, load: PrefixLoad, starts: Iterable[int], session: int = SESSION
) -> None:
    """Chunks of the source come."""
    for start in starts:
        end = min(start + CHUNK_TOKENS, load.end)
        content = source.copy_session_cache(session, start, end)
        assert content is not None
        load.add_chunk(start, end, content)


def moved(
    source: BuiltinEngine, target: BuiltinEngine, down: bool = True, session: int = SESSION
) -> int:
    """Sends all of a session; how many tokens came."""
    cache = source.describe_session_cache(session)
    load = None if cache is None else offered(cache, target, session=session)
    if cache is None or load is None:
        return 0
    starts = list(range(0, load.end, CHUNK_TOKENS))
    brought(source, load, reversed(starts) if down and not load.is_front_first else starts, session)
    load.is_finished = True
    return load.end


def computed_by(engine: BuiltinEngine, turn: GenerationRequest) -> tuple[int, Heard]:
    before = engine.tokens_computed
    heard = Listener(engine).run(turn)[turn.id]
    return engine.tokens_computed - before, heard


@pytest.mark.rotating(4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [4, 9, 16, 70, 400])
@pytest.mark.parametrize("down", [True, False])
def test_a_moved_session_goes_on_bit_for_bit(
    make: Make, length: int, temperature: float, down: bool
) -> None:
    source, target = make(max_length=512), make(max_length=512)
    context = begun(source, length)
    cached = len(context) - 3  # all but the last sampled token and the tool's result
    assert moved(source, target, down) == cached
    turn = next_turn(context, temperature)
    computed, there = computed_by(target, turn)
    assert computed == 3 + 11
    _, here = computed_by(source, turn)
    assert (there.tokens, there.versions) == (here.tokens, here.versions)
    assert there.logprobs == here.logprobs
    holds(there, decoder(), context, temperature or 1.0)


@NATIVE
@pytest.mark.parametrize("path", ["native", "graphs"])
def test_bfloat16_moves_as_exactly(path: str) -> None:
    source, target = (built_in(path, dtype="bfloat16") for _ in range(2))
    context = begun(source, 40)
    assert moved(source, target) == len(context) - 3
    assert computed_by(target, next_turn(context))[1].logprobs == (
        computed_by(source, next_turn(context))[1].logprobs
    )


def test_a_session_moves_on_from_where_it_was_moved_to(make: Make) -> None:
    first, second, third = make(), make(), make()
    context = begun(first, 33)
    assert moved(first, second) == len(context) - 3
    heard = Listener(second).run(next_turn(context))[2]
    context = [*context, *heard.tokens, 9]
    assert moved(second, third) == len(context) - 2
    there = Listener(third).run(next_turn(context, 0.0))[2]
    holds(there, decoder(), context)


def test_the_target_computes_beside_what_came(make: Make) -> None:
    source, target = make(), make()
    context = begun(source, 40)
    others = {i: words(i, 9 + i) for i in range(10, 13)}
    target.submit([request(i, tokens, max_new=40) for i, tokens in others.items()])
    for _ in range(4):
        target.step()
    assert moved(source, target) == len(context) - 3
    heard = Listener(target).run(next_turn(context))
    holds(heard[2], decoder(), context)
    for i, tokens in others.items():
        holds(heard[i], decoder(), tokens)


@pytest.mark.rotating(3)
@NATIVE
@pytest.mark.parametrize("source", BUILT_IN)
@pytest.mark.parametrize("target", BUILT_IN)
def test_another_layout_is_refused(source: str, target: str) -> None:
    if source != target:
        from_, to = built_in(source), built_in(target)
        context = begun(from_)
        assert moved(from_, to) == 0
        holds(Listener(to).run(next_turn(context))[2], decoder(), context)
    narrow = built_in("native", dtype="bfloat16")
    begun(narrow)
    assert moved(narrow, built_in("native")) == 0


def test_what_runs_is_not_given_and_what_is_unknown_is_not_there(make: Make) -> None:
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
def test_a_cache_of_older_weights_is_taken_only_where_a_token_shows_it(
    make: Make, mode: str
) -> None:
    """As if the session had stayed and its engine had taken the new weights."""
    source, target, stayed = (make(kv_on_update=mode) for _ in range(3))
    context = begun(source, 20)
    begun(stayed, 20)
    for engine in (target, stayed):
        engine.update_weights(decoder(1).state_dict(), 1)
    taken = moved(source, target)
    assert taken == (len(context) - 3 if mode == "keep" else 0)
    there = Listener(target).run(next_turn(context))[2]
    here = Listener(stayed).run(next_turn(context))[2]
    assert there.versions == here.versions == [1] * 12
    assert there.tokens == here.tokens
    np.testing.assert_allclose(there.logprobs, here.logprobs, atol=2e-4)


def test_a_mixed_cache_moves_on_as_mixed_and_is_shared_with_nobody(make: Make) -> None:
    source, target = make(), make()
    context = begun(source, 40)
    source.update_weights(decoder(1).state_dict(), 1)
    heard = Listener(source).run(next_turn(context))[2]
    context = [*context, *heard.tokens, 9]
    target.update_weights(decoder(1).state_dict(), 1)
    cache = source.describe_session_cache(SESSION)
    assert cache is not None and cache.version == MIXED_VERSIONS and cache.first_version == 0
    assert moved(source, target) == len(context) - 2
    Listener(target).run(next_turn(context))
    assert target.describe_session_cache(SESSION).version == MIXED_VERSIONS  # type: ignore[union-attr]
    alone = Listener(target).run(request(5, context[:45], max_new=4))[5]
    holds(alone, decoder(1), context[:45])


def test_a_token_of_the_targets_own_version_shows_no_mixture(make: Make) -> None:
    """The source is ahead: its first token says 0, and so would what the target samples."""
    source, target = make(), make()
    begun(source, 20)
    source.update_weights(decoder(1).state_dict(), 1)
    assert moved(source, target) == 0


def test_what_no_token_of_a_version_was_sampled_over_is_not_mixed(make: Make) -> None:
    source, target = make(), make()
    cache = exported(source, 20)
    target.update_weights(decoder(1).state_dict(), 1)
    unsampled = replace(cache, first_sampled_index=len(cache.tokens))
    assert offered(unsampled, target) is None
    relabelled = replace(cache, first_version=1)  # computed again under 0 after a swap back
    assert offered(relabelled, target) is None
    assert offered(cache, target, alone=False) is None, "front and back would not fit"
    assert offered(cache, target) is not None


def exported(engine: BuiltinEngine, length: int) -> SessionCache:
    begun(engine, length)
    cache = engine.describe_session_cache(SESSION)
    assert cache is not None
    return cache


def test_after_a_swap_the_target_keeps_what_the_source_would_have_kept(make: Make) -> None:
    """The token that the session had sampled shows it, wherever that was."""
    source, target = make(), make()
    context = begun(source, 20)
    assert moved(source, target)
    target.submit([next_turn(context)])
    target.step()
    for engine in (source, target):
        engine.update_weights(decoder(1).state_dict(), 1)
    before = target.tokens_computed
    there = Listener(target).run()[2]
    assert target.tokens_computed - before < len(context)
    assert set(there.versions) <= {0, 1}


def test_what_was_on_its_way_is_not_used_after_a_swap(make: Make) -> None:
    source, target = make(max_length=512), make(max_length=512)
    context = begun(source, 300)
    load = loading(source, target)
    target.submit([next_turn(context)])
    brought(source, load, [256])
    target.step()
    target.update_weights(decoder(1).state_dict(), 1)
    assert load.is_cancelled
    brought(source, load, [128, 0])
    holds(Listener(target).run()[2], decoder(1), context)


@pytest.mark.parametrize("instead", [[], [0]])
def test_a_session_that_lost_its_only_sampled_token_starts_anew(
    make: Make, instead: list[int]
) -> None:
    """The ledger never saw it, so no token would show that the prompt's cache is older."""
    engine = make()
    context = words(5, 40)
    heard = Listener(engine).run(request(1, context, session=SESSION, max_new=1))
    assert heard[1].tokens != [0]
    engine.update_weights(decoder(1).state_dict(), 1)
    context += instead
    holds(
        Listener(engine).run(request(2, context, session=SESSION, max_new=5))[2],
        decoder(1),
        context,
    )


# -- room ----------------------------------------------------------------------------------------


@NATIVE
@pytest.mark.parametrize("path", ["native", "graphs"])
def test_what_comes_has_the_room_of_its_request_and_no_more(path: str) -> None:
    """Idle sessions give way to it and running requests do not."""
    source, target = built_in(path), built_in(path, slots=4, kv_cache_tokens=9 * BLOCK_TOKENS)
    context = begun(source, 60)
    Listener(target).run(request(20, words(20, 30), session=20, max_new=2))
    target.submit([request(i, words(i, 30), max_new=30) for i in (10, 11)])
    for _ in range(8):
        target.step()
    assert moved(source, target) == len(context) - 3
    assert target.describe_session_cache(20) is not None, (
        "nothing gave way for what nobody has asked for yet"
    )
    heard = Listener(target).run(next_turn(context))
    assert target.describe_session_cache(20) is None
    for i in (10, 11):
        holds(heard[i], decoder(), words(i, 30))
    holds(heard[2], decoder(), context)


def test_a_session_too_long_for_the_target_is_refused(make: Make) -> None:
    source, target = make(), make(max_length=64)
    begun(source, 60)
    assert moved(source, target) == 0


@pytest.mark.rotating(3)
@pytest.mark.parametrize("chunks", [[], [256], [384, 256], [128], [0, 384]])
def test_a_move_that_breaks_off_leaves_what_came(make: Make, chunks: list[int]) -> None:
    source, target = make(max_length=512), make(max_length=512)
    context = begun(source, 420)
    load = loading(source, target)
    brought(source, load, chunks)
    load.is_finished = True
    computed, heard = computed_by(target, next_turn(context))
    came = sum(min(CHUNK_TOKENS, load.end - start) for start in chunks)
    assert computed == len(context) - came + 11
    holds(heard, decoder(), context)


def test_chunks_that_are_not_what_they_say_are_left_out(make: Make) -> None:
    source, target = make(max_length=512), make(max_length=512)
    context = begun(source, 300)
    load, content = loading(source, target), source.copy_session_cache(SESSION, 128, 256)
    assert content is not None
    load.add_chunk(128, 256, content[:-16])
    load.add_chunk(512, 640, content)
    load.is_finished = True
    computed, heard = computed_by(target, next_turn(context))
    assert computed == len(context) + 11
    holds(heard, decoder(), context)


@NATIVE
@pytest.mark.parametrize("path", ["native", "graphs"])
def test_more_than_the_request_has_is_written_nowhere(path: str) -> None:
    """The source has computed a turn that the ledger never saw; others have the blocks behind."""
    source, target = (built_in(path, max_length=512, kv_cache_tokens=1024) for _ in range(2))
    context = words(5, 260)
    said = Listener(source).run(request(1, context, session=SESSION, max_new=90, seed=9))[1].tokens
    others = {i: words(i, 100) for i in range(10, 13)}
    target.submit([request(i, tokens, max_new=20) for i, tokens in others.items()])
    target.step()
    assert moved(source, target) > len(context) + 4 * BLOCK_TOKENS
    context += said[:5]
    heard = Listener(target).run(request(2, context, session=SESSION, max_new=4))
    holds(heard[2], decoder(), context)
    for i, tokens in others.items():
        holds(heard[i], decoder(), tokens)


def test_what_no_token_was_sampled_over_goes_with_its_weights(make: Make) -> None:
    """It was lost in the middle of its prompt: after a swap nothing would show it."""
    source, target = make(max_length=1024), make(max_length=1024)
    prompt = words(5, 1000)
    Listener(source).run(request(1, prompt[:300], session=SESSION, max_new=1))
    cache = source.describe_session_cache(SESSION)
    assert cache is not None
    load = offered(replace(cache, first_sampled_index=300, first_version=0), target)
    assert load is not None
    load.end = 300
    target.submit([request(2, prompt, session=SESSION, max_new=4, temperature=0.0)])
    brought(source, load, [0, 128, 256])
    load.is_finished = True
    target.step()
    target.update_weights(decoder(1).state_dict(), 1)
    holds(Listener(target).run()[2], decoder(1), prompt)


@NATIVE
@pytest.mark.parametrize("path", ["native", "graphs"])
def test_a_request_that_ends_while_it_is_loaded_holds_no_room(path: str) -> None:
    source, target = built_in(path, max_length=512), built_in(path, max_length=512)
    context = begun(source, 300)
    load = loading(source, target)
    load.expected_chunk_s, load._last_received_s = 1e-9, target._clock.monotonic()
    target.scheduler.prefill_rate.add_step(1000, 1000, 1.0)
    target.submit([next_turn(context)])
    target.step()
    memory = target._paged_cache
    assert (
        isinstance(memory, PagedCache) and memory.block_pool.num_free < memory.block_pool.num_blocks
    )
    target.abort([2])
    assert memory.block_pool.num_free == memory.block_pool.num_blocks and load.is_cancelled


def test_what_was_offered_for_an_adapters_last_version_is_not_used(make: Make) -> None:
    source, target = make(), make()
    for engine in (source, target):
        engine.load_adapter("a", adapter(1), SCALE, 10)
    context = words(5, 60)
    asked = request(1, context, session=SESSION, max_new=3, adapter="a")
    said = Listener(source).run(asked)[1].tokens
    load = loading(source, target, alone=False)
    brought(source, load, [0])
    target.load_adapter("a", adapter(2), SCALE, 11)
    assert load.is_cancelled
    context = [*context, *said, 7]
    heard = Listener(target).run(request(2, context, session=SESSION, max_new=3, adapter="a"))
    holds(heard[2], with_adapter(adapter(2)), context)


def test_other_tokens_than_the_session_has_are_not_used(make: Make) -> None:
    source, target = make(), make()
    cache = exported(source, 60)
    other = [*words(6, 60), *cache.tokens[60:].tolist(), 3, 7, 8]
    assert moved(source, target)
    computed, heard = computed_by(target, next_turn(other))
    assert computed == len(other) + 11
    holds(heard, decoder(), other)


def test_a_session_that_ends_wants_nothing_more(make: Make) -> None:
    source, target = make(), make()
    begun(source, 20)
    load = loading(source, target)
    target.release_sessions([SESSION])
    assert load.is_cancelled and not load.needs_chunk(0)


def test_of_sessions_that_never_come_the_oldest_are_given_up(make: Make) -> None:
    source, target = make(), make()
    cache = exported(source, 20)
    loads = [offered(cache, target, session=i) for i in range(MAX_OFFERED_LOADS + 2)]
    gone = [load is not None and load.is_cancelled for load in loads]
    assert gone == [True, True] + [False] * MAX_OFFERED_LOADS


def test_a_cache_that_comes_after_its_request_is_used_from_then_on(make: Make) -> None:
    source, target = make(max_length=1024), make(max_length=1024)
    context = begun(source, 900)
    target.submit([next_turn(context)])
    target.step()
    before = target.tokens_computed
    assert moved(source, target) == len(context) - 3
    heard = Listener(target).run()[2]
    assert target.tokens_computed - before <= 11 + 3 + CHUNK_TOKENS
    holds(heard, decoder(), context)


def test_an_engine_that_sleeps_neither_gives_nor_takes(make: Make) -> None:
    source, target = make(), make()
    cache = exported(source, 20)
    target.sleep()
    assert offered(cache, target) is None
    source.sleep()
    assert (
        source.describe_session_cache(SESSION) is None
        and source.copy_session_cache(SESSION, 0, 1) is None
    )


@NATIVE
@pytest.mark.parametrize("path", ["native", "graphs"])
def test_a_group_that_moves_shares_its_prompt_again(path: str) -> None:
    source, target = built_in(path, slots=8), built_in(path, slots=8)
    prompt = words(5, 64)
    asked = [request(i, prompt, session=i, max_new=3) for i in range(4)]
    heard = Listener(source).run(*asked)
    memory = target._paged_cache
    assert isinstance(memory, PagedCache)
    for i in range(4):
        assert moved(source, target, session=i)
        context = [*prompt, *heard[i].tokens, 7]
        listener = Listener(target)
        holds(listener.run(request(9, context, session=i, max_new=4))[9], decoder(), context)
    assert memory.block_pool.num_blocks - memory.block_pool.num_free == 4 + 4, (
        "the prompt once, and each its own end"
    )
    target.release_sessions(range(4))
    assert (
        memory.block_pool.ref_counts <= 1
    ).all() and memory.block_pool.num_free + memory.prefix_cache.num_blocks == (
        memory.block_pool.num_blocks
    )


@pytest.mark.rotating(3)
@NATIVE
@pytest.mark.parametrize("seed", range(8))
def test_whatever_moves_and_gives_way_every_token_is_right(seed: int) -> None:
    """Two engines under pressure, sessions that change sides at random."""
    random = np.random.default_rng(seed)
    engines = [
        built_in(
            "native", slots=4, kv_cache_tokens=(10 + seed) * BLOCK_TOKENS, steps=4, budget_s=60.0
        )
        for _ in range(2)
    ]
    contexts = {session: words(session % 3, 20 + 9 * session) for session in range(5)}
    home = dict.fromkeys(contexts, 0)
    taken = 0
    for turn in range(40):
        session = int(random.integers(5))
        if random.random() < 0.6:
            there, home[session] = engines[home[session]], 1 - home[session]
            taken += bool(moved(there, engines[home[session]], session=session))
        engine = engines[home[session]]
        aside = request(1000 + turn, words(turn, 17), max_new=int(random.integers(1, 40)))
        context = contexts[session]
        heard = Listener(engine).run(
            request(turn, context, session=session, max_new=int(random.integers(1, 6))), aside
        )
        holds(heard[turn], decoder(), context)
        holds(heard[1000 + turn], decoder(), words(turn, 17))
        contexts[session] = [*context, *heard[turn].tokens, int(random.integers(30))][:100]
    assert taken > 5


# -- measured costs ------------------------------------------------------------------------------


def test_the_prefill_rate_is_that_of_long_stretches() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s == 0.0
    for _ in range(20):
        rate.add_step(512, 512, 0.1)
        rate.add_step(3, 30, 0.05)  # a short tool result beside a batch that decodes
    assert 0.9 * 5120 < rate.tokens_per_s <= 5120
    for _ in range(80):
        rate.add_step(512, 512, 0.2)
    assert abs(rate.tokens_per_s - 2560) < 100


def test_an_engine_tells_what_it_measures(make: Callable[..., BuiltinEngine]) -> None:
    clock = Ticking()
    engine = partial(make, max_length=700, slots=2)(clock=clock)
    assert engine.prefill_tokens_per_s == 0.0
    Listener(engine).run(request(1, words(1, 600), max_new=1, session=SESSION))
    assert engine.prefill_tokens_per_s > 0
    content = engine.copy_session_cache(SESSION, 0, 600)
    assert content is not None and len(content) >= 600 * engine.cache_bytes_per_token
    assert len(content) < (600 + BLOCK_TOKENS) * engine.cache_bytes_per_token


class Ticking:
    """A millisecond passes between two looks."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.001
        return self.now_s

    wall = monotonic


def test_log_probabilities_after_a_move_are_the_models(make: Make) -> None:
    source, target = make(), make()
    context = begun(source, 30)
    moved(source, target)
    heard = Listener(target).run(next_turn(context))[2]
    np.testing.assert_allclose(
        heard.logprobs, expected_logprobs(decoder(), context, heard.tokens), atol=2e-4
    )
