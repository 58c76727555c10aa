"""A session goes on at another engine as it would have where it was; what is unsure is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from common.generation.builtin.blocks import BLOCK
from common.generation.builtin.build import TorchEngine
from common.generation.builtin.paged import PagedMemory
from common.generation.builtin.prefill_rate import PrefillRate
from common.generation.contract import MIXED, Request, SessionCache
from tests.unit.common.generation.engines_under_test import (
    BUILT_IN,
    Heard,
    Listener,
    built_in,
    decoder,
    request,
)
from tests.unit.common.generation.test_torch_engine import (
    Make,
    expected_logprobs,
    holds,
    make,
    words,
)

__all__ = ["make"]

SESSION = 3
NATIVE = pytest.mark.needs("compiler")


def begun(engine: TorchEngine, length: int = 20, new: int = 6, seed: int = 5) -> list[int]:
    """A first turn of the session; its context afterwards, with a tool's result."""
    context = words(seed, length)
    heard = Listener(engine).run(request(1, context, session=SESSION, max_new=new, seed=9))
    return [*context, *heard[1].tokens, 7, 8]


def next_turn(context: list[int], temperature: float = 1.0, **more: int) -> Request:
    return request(
        2, context, session=SESSION, seed=11, temperature=temperature, **{"max_new": 12, **more}
    )


def moved(source: TorchEngine, target: TorchEngine, most_bytes: int = 1 << 62) -> int:
    """Moves the session part by part; how many tokens the target took."""
    taken = 0
    while (cache := source.export(SESSION, taken, most_bytes)) is not None:
        if not target.adopt(SESSION, cache):
            break
        taken = cache.end
    return taken


def computed_by(engine: TorchEngine, turn: Request) -> tuple[int, Heard]:
    before = engine.tokens_computed
    heard = Listener(engine).run(turn)[turn.id]
    return engine.tokens_computed - before, heard


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [4, 9, 16, 70])
@pytest.mark.parametrize("parts", ["whole", "by_block"])
def test_a_moved_session_goes_on_bit_for_bit(
    make: Make, length: int, temperature: float, parts: str
) -> None:
    source, target = make(), make()
    context = begun(source, length)
    cached = len(context) - 3  # all but the last sampled token and the tool's result
    assert moved(source, target, 1 << 62 if parts == "whole" else 1) == cached
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
    assert moved(first, second) == moved(second, third) == len(context) - 3
    heard = Listener(third).run(next_turn(context))[2]
    assert heard.logprobs == Listener(first).run(next_turn(context))[2].logprobs


def test_the_target_computes_beside_what_came(make: Make) -> None:
    source, target = make(), make()
    context = begun(source, 40)
    others = {i: words(i, 9 + i) for i in range(10, 13)}
    target.submit([request(i, tokens, max_new=40) for i, tokens in others.items()])
    for _ in range(4):
        target.step()
    assert moved(source, target, 1) == len(context) - 3
    heard = Listener(target).run(next_turn(context))
    holds(heard[2], decoder(), context)
    for i, tokens in others.items():
        holds(heard[i], decoder(), tokens)


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


def test_what_runs_is_not_exported_and_what_is_unknown_is_not_there(make: Make) -> None:
    engine = make()
    assert engine.export(SESSION) is None
    engine.submit([request(1, words(1, 30), session=SESSION)])
    engine.step()
    assert engine.export(SESSION) is None
    Listener(engine).run()
    assert engine.export(SESSION) is not None
    engine.release([SESSION])
    assert engine.export(SESSION) is None


# -- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_cache_of_older_weights_is_taken_only_where_a_token_shows_it(
    make: Make, mode: str
) -> None:
    """As if the session had stayed and its engine had taken the new weights."""
    source, target, stayed = (make(kv_on_update=mode) for _ in range(3))
    context = begun(source, 20)
    begun(stayed, 20)
    for engine in (target, stayed):
        engine.swap(decoder(1).state_dict(), 1)
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
    source.swap(decoder(1).state_dict(), 1)
    heard = Listener(source).run(next_turn(context))[2]
    context = [*context, *heard.tokens, 9]
    target.swap(decoder(1).state_dict(), 1)
    cache = source.export(SESSION)
    assert cache is not None and cache.version == MIXED and cache.first_version == 0
    assert moved(source, target) == len(context) - 2
    assert target.export(SESSION).version == MIXED  # type: ignore[union-attr]
    alone = Listener(target).run(request(5, context[:45], max_new=4))[5]
    holds(alone, decoder(1), context[:45])


def test_a_token_of_the_targets_own_version_shows_no_mixture(make: Make) -> None:
    """The source is ahead: its first token says 0, and so would what the target samples."""
    source, target = make(), make()
    begun(source, 20)
    source.swap(decoder(1).state_dict(), 1)
    assert moved(source, target) == 0


def test_what_no_token_of_a_version_was_sampled_over_is_not_mixed(make: Make) -> None:
    source, target = make(), make()
    cache = exported(source, 20)
    target.swap(decoder(1).state_dict(), 1)
    unsampled = replace(cache, first_sampled=len(cache.tokens))
    assert not target.adopt(SESSION, unsampled)
    relabelled = replace(cache, first_version=1)  # computed again under 0 after a swap back
    assert not target.adopt(SESSION, relabelled)
    assert target.adopt(SESSION, cache)


def exported(engine: TorchEngine, length: int) -> SessionCache:
    begun(engine, length)
    cache = engine.export(SESSION)
    assert cache is not None
    return cache


def test_after_a_swap_the_target_keeps_what_the_source_would_have_kept(make: Make) -> None:
    source, target = make(), make()
    context = begun(source, 20)
    assert moved(source, target)
    for engine in (source, target):
        engine.swap(decoder(1).state_dict(), 1)
    (n, there), (m, here) = (computed_by(e, next_turn(context)) for e in (target, source))
    assert n == m == 3 + 11
    assert there.logprobs == here.logprobs and there.versions == [1] * 12


@pytest.mark.parametrize("instead", [[], [0]])
def test_a_session_that_lost_its_only_sampled_token_starts_anew(
    make: Make, instead: list[int]
) -> None:
    """The ledger never saw it, so no token would show that the prompt's cache is older."""
    engine = make()
    context = words(5, 40)
    heard = Listener(engine).run(request(1, context, session=SESSION, max_new=1))
    assert heard[1].tokens != [0]
    engine.swap(decoder(1).state_dict(), 1)
    context += instead
    holds(
        Listener(engine).run(request(2, context, session=SESSION, max_new=5))[2],
        decoder(1),
        context,
    )


# -- room ----------------------------------------------------------------------------------------


def test_idle_sessions_make_room_for_one_that_comes_and_running_requests_do_not(
    make: Make,
) -> None:
    source, target = make(), make(slots=2)
    context = begun(source, 20)
    target.submit([request(i, words(i, 12), session=i, max_new=30) for i in (50, 51)])
    target.step()
    assert moved(source, target) == 0, "both slots run"
    listener = Listener(target)
    listener.run()
    assert moved(source, target) == len(context) - 3
    assert target.export(50) is None and target.export(51) is not None, "the longest idle went"
    listener.heard.clear()
    holds(listener.run(next_turn(context))[2], decoder(), context)


def test_who_waits_for_a_slot_goes_before_one_that_comes(make: Make) -> None:
    source, target = make(), make(slots=2)
    begun(source, 20)
    target.submit([request(1, words(1, 5), session=8, max_new=2)])
    assert moved(source, target) == 0
    Listener(target).run()
    assert moved(source, target)


@NATIVE
@pytest.mark.parametrize("path", ["native", "graphs"])
def test_blocks_of_running_requests_are_left_alone(path: str) -> None:
    source, target = built_in(path), built_in(path, slots=4, kv_tokens=9 * BLOCK)
    context = begun(source, 60)
    Listener(target).run(request(20, words(20, 30), session=20, max_new=2))
    target.submit([request(i, words(i, 30), max_new=30) for i in (10, 11)])
    for _ in range(8):
        target.step()
    kept = target.export(20)
    assert moved(source, target) == 0, "what runs has six of nine blocks"
    assert kept is not None and target.export(20) is not None, "nothing gave way for nothing"
    heard = Listener(target).run()
    assert target.preempted == 0
    for i in (10, 11):
        holds(heard[i], decoder(), words(i, 30))
    assert moved(source, target) == len(context) - 3
    holds(Listener(target).run(next_turn(context))[2], decoder(), context)


def test_a_session_too_long_for_the_target_is_refused(make: Make) -> None:
    source, target = make(), make(max_length=64)
    begun(source, 60)
    assert moved(source, target) == 0


def test_a_move_that_breaks_off_leaves_what_came(make: Make) -> None:
    source, target = make(), make()
    context = begun(source, 60)
    part = source.export(SESSION, 0, 1)
    assert part is not None and part.end == BLOCK
    assert target.adopt(SESSION, part)
    computed, heard = computed_by(target, next_turn(context))
    assert computed == len(context) - BLOCK + 11
    holds(heard, decoder(), context)


def test_parts_that_do_not_follow_each_other_are_refused(make: Make) -> None:
    source, target = make(), make()
    begun(source, 60)
    one, two = (source.export(SESSION, at, 1) for at in (0, BLOCK))
    assert one is not None and two is not None
    assert not target.adopt(SESSION, two), "nothing begun"
    assert target.adopt(SESSION, one)
    other = replace(two, tokens=np.roll(two.tokens, 1))
    cut = replace(two, content=two.content[:-1])
    beyond = replace(two, end=len(two.tokens) + 1)
    uneven = replace(two, end=two.end - 1)
    for wrong in (other, cut, beyond, uneven):
        assert not target.adopt(SESSION, wrong)
    assert target.adopt(SESSION, two)
    assert not target.adopt(SESSION, two), "it is there already"
    target.release([SESSION])
    assert not target.adopt(SESSION, two), "the session has ended"


def test_an_engine_that_sleeps_neither_gives_nor_takes(make: Make) -> None:
    source, target = make(), make()
    cache = exported(source, 20)
    target.sleep()
    assert not target.adopt(SESSION, cache)
    source.sleep()
    assert source.export(SESSION) is None


@NATIVE
@pytest.mark.parametrize("path", ["native", "graphs"])
def test_a_group_that_moves_shares_its_prompt_again(path: str) -> None:
    source, target = built_in(path, slots=8), built_in(path, slots=8)
    prompt = words(5, 64)
    asked = [request(i, prompt, session=i, max_new=3) for i in range(4)]
    heard = Listener(source).run(*asked)
    for i in range(4):
        cache = source.export(i)
        assert cache is not None and target.adopt(i, cache)
    memory = target._memory
    assert isinstance(memory, PagedMemory)
    assert memory.pool.count - memory.pool.free == 4 + 4, "the prompt once, and each its own end"
    for i in range(4):
        context = [*prompt, *heard[i].tokens, 7]
        listener = Listener(target)
        holds(listener.run(request(9, context, session=i, max_new=4))[9], decoder(), context)
    target.release(range(4))
    assert (memory.pool.holders <= 1).all() and memory.pool.free + memory.prefixes.blocks == (
        memory.pool.count
    )


@NATIVE
@pytest.mark.parametrize("seed", range(8))
def test_whatever_moves_and_gives_way_every_token_is_right(seed: int) -> None:
    """Two engines under pressure, sessions that change sides at random."""
    random = np.random.default_rng(seed)
    engines = [
        built_in("native", slots=4, kv_tokens=(10 + seed) * BLOCK, steps=4, budget_s=60.0)
        for _ in range(2)
    ]
    contexts = {session: words(session % 3, 20 + 9 * session) for session in range(5)}
    home = dict.fromkeys(contexts, 0)
    taken = 0
    for turn in range(40):
        session = int(random.integers(5))
        if random.random() < 0.6:
            cache = engines[home[session]].export(session)
            home[session] = 1 - home[session]
            if cache is not None:
                taken += engines[home[session]].adopt(session, cache)
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
        rate.add(512, 512, 0.1)
        rate.add(3, 30, 0.05)  # a short tool result beside a batch that decodes
    assert 0.9 * 5120 < rate.tokens_per_s <= 5120
    for _ in range(80):
        rate.add(512, 512, 0.2)
    assert abs(rate.tokens_per_s - 2560) < 100


def test_an_engine_tells_what_it_measures(make: Callable[..., TorchEngine]) -> None:
    clock = Ticking()
    engine = partial(make, max_length=700, slots=2)(clock=clock)
    assert engine.prefill_tokens_per_s == 0.0
    Listener(engine).run(request(1, words(1, 600), max_new=1, session=SESSION))
    assert engine.prefill_tokens_per_s > 0
    cache = engine.export(SESSION)
    assert cache is not None
    assert len(cache.content) >= 600 * engine.cache_bytes_per_token
    assert len(cache.content) < (600 + BLOCK) * engine.cache_bytes_per_token


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
