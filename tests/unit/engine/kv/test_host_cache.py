"""What an engine's cache lets go of comes back, and is what it would have been had it stayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine
from meshrl.common.generation.engine_contract import GenerationRequest
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS
from meshrl.services.engine.kv.chunk_files import ChunkHeader, StoredChunk
from meshrl.services.engine.kv.host_cache import HostCache
from meshrl.services.engine.kv.kv_tier import KVTier
from tests.load import scaled
from tests.unit.common.generation.engines_under_test import (
    BUILT_IN,
    SCALE,
    Heard,
    Listener,
    adapter,
    built_in,
    decoder,
    request,
)
from tests.unit.common.generation.test_builtin_engine import holds, words

SESSION, PROMPT = 3, 700


def first_turn(engine: BuiltinEngine, **more: Any) -> list[int]:
    """The session's context after its first turn and a tool's answer."""
    context = words(5, PROMPT)
    heard = run(engine, request(1, context, session=SESSION, max_new=6, seed=9, **more))
    return [*context, *heard.tokens, 7, 8]


def second_turn(engine: BuiltinEngine, context: list[int], **more: Any) -> tuple[Heard, int]:
    """What the engine says, and the tokens that it computed; what is kept may come first."""
    before = engine.tokens_computed
    asked = request(2, context, session=SESSION, max_new=5, seed=11, temperature=0.0, **more)
    heard = run(engine, asked, loading=True)
    return heard, engine.tokens_computed - before


def lost(engine: BuiltinEngine, cache: HostCache, version: int = 0) -> None:
    """The engine sleeps and wakes: its own cache is empty."""
    engine.sleep()
    engine.wake(decoder(version).state_dict(), version)
    settled(cache)


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("path", BUILT_IN)
def test_a_session_goes_on_after_its_engine_slept(tmp_path: Path, path: str) -> None:
    with cached(tmp_path / "kv", path) as (engine, cache):
        context = first_turn(engine)
        lost(engine, cache)
        heard, computed = second_turn(engine, context)
        holds(heard, decoder(), context)
        assert computed < len(context) - CHUNK_TOKENS
        told = cache.stats()
        assert told.loaded["disk"] >= CHUNK_TOKENS and told.saved_s > 0


@pytest.mark.needs("compiler")
def test_a_session_goes_on_after_others_took_its_slot(tmp_path: Path) -> None:
    with cached(tmp_path / "kv", slots=2, kv_cache_tokens=LENGTH + 64) as (engine, cache):
        context = first_turn(engine)
        for other in range(10, 13):
            run(engine, request(other, words(other, 600), session=other, max_new=2))
        settled(cache)
        heard, _ = second_turn(engine, context)
        holds(heard, decoder(), context)
        assert cache.stats().loaded["disk"] >= CHUNK_TOKENS


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("path", ["native", "graphs"])
def test_requests_that_give_way_are_loaded_again(tmp_path: Path, path: str) -> None:
    """Three that grow in a cache with room for one and a half."""
    with cached(tmp_path / "kv", path, kv_cache_tokens=LENGTH + 400) as (engine, cache):
        listener = Listener(engine)
        asked = [request(i, words(i, 650), max_new=150, temperature=0.0) for i in range(3)]
        engine.submit(asked)
        while engine.num_running or engine.num_waiting:
            engine.step()
            settled(cache)
            arrived(engine)
            listener.drain()
        for i in range(3):
            holds(listener.of(i), decoder(), words(i, 650))
        assert engine.num_preempted and cache.stats().loaded["disk"] >= CHUNK_TOKENS


@pytest.mark.needs("compiler")
def test_engines_of_one_host_share_what_they_compute(tmp_path: Path) -> None:
    """A prompt that one has computed is loaded by the other; and so is a session that moved."""
    with (
        cached(tmp_path / "kv") as (one, first),
        cached(tmp_path / "kv") as (two, second),
    ):
        context = first_turn(one)
        settled(first)
        heard, computed = second_turn(two, context)
        holds(heard, decoder(), context)
        # How much of it comes before it is computed here depends on how busy the host is.
        assert second.stats().loaded["disk"] >= CHUNK_TOKENS
        assert computed < len(context)


@pytest.mark.needs("compiler")
def test_an_engine_that_goes_leaves_what_it_generated_to_the_others(tmp_path: Path) -> None:
    with (
        cached(tmp_path / "kv") as (one, first),
        cached(tmp_path / "kv") as (two, second),
    ):
        context = words(5, 300)
        said = run(one, request(1, context, session=SESSION, max_new=600, temperature=0.0)).tokens
        context = [*context, *said, 7]
        first.offload_all()
        settled(first)
        heard, computed = second_turn(two, context)
        holds(heard, decoder(), context)
        assert computed < len(context) - CHUNK_TOKENS
        assert any(
            one.header.start_token > 300 for one in on_shelves(second) if one.header is not None
        )


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("other", ["weights", "policy", "layout", "adapter"])
def test_what_others_have_computed_is_no_use(tmp_path: Path, other: str) -> None:
    there: dict[str, Any] = {"weights": "v1"} if other == "weights" else {}
    policy = "recompute" if other == "policy" else "keep"
    path = "graphs" if other == "layout" else "native"
    with (
        cached(tmp_path / "kv") as (one, first),
        cached(tmp_path / "kv", path, policy=policy, **there) as (two, second),
    ):
        context = first_turn(one)
        lost(one, first)
        more = {}
        if other == "adapter":
            two.load_adapter("a", adapter(1), SCALE, 10)
            more = {"adapter": "a"}
        heard, computed = second_turn(two, context, **more)
        assert not second.stats().loaded and computed == len(context) + 4
        if other != "adapter":
            holds(heard, decoder(), context)


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("harm", [_flip, Path.unlink, lambda p: p.write_bytes(b"short")])
def test_chunks_that_are_damaged_are_computed(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    with cached(tmp_path / "kv") as (engine, cache):
        context = first_turn(engine)
        lost(engine, cache)
        files = [one.path for one in on_shelves(cache)]
        assert len(files) >= PROMPT // CHUNK_TOKENS
        for path in files:
            harm(path)
        heard, computed = second_turn(engine, context)
        holds(heard, decoder(), context)
        assert computed == len(context) + 4 and not cache.stats().loaded


# -- versions ------------------------------------------------------------------------------------


@pytest.mark.needs("compiler")
@pytest.mark.rotating(3)
@pytest.mark.parametrize("path", BUILT_IN)
@pytest.mark.parametrize("mixed", [False, True])
def test_a_cache_of_older_weights_is_unchanged(tmp_path: Path, path: str, mixed: bool) -> None:
    """One turn under version 0, with `mixed` another under 1, and the last under 1 or 2."""
    with (
        cached(tmp_path / "kv", path) as (engine, cache),
        cached(tmp_path / "other", path) as (stayed, _),
    ):
        contexts = [first_turn(each) for each in (engine, stayed)]
        last = 2 if mixed else 1
        for each, context in zip((engine, stayed), contexts, strict=True):
            if mixed:
                each.update_weights(decoder(1).state_dict(), 1)
                heard = run(each, request(4, context, session=SESSION, max_new=3, seed=1))
                context += [*heard.tokens, 9]
        assert contexts[0] == contexts[1]
        if mixed:
            cache.set_weights("v1")
        lost(engine, cache, 1 if mixed else 0)  # what it lets go of is of the weights before
        for each in (engine, stayed):
            each.update_weights(decoder(last).state_dict(), last)
        cache.set_weights(f"v{last}")
        settled(cache)
        before = stayed.tokens_computed
        expected = run(
            stayed,
            request(2, contexts[0], session=SESSION, max_new=5, seed=11, temperature=0.0),
        )
        heard, computed = second_turn(engine, contexts[0])
        assert computed == stayed.tokens_computed - before
        assert (heard.tokens, heard.versions) == (expected.tokens, expected.versions)
        np.testing.assert_allclose(heard.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.needs("compiler")
def test_under_recompute_nothing_of_older_weights_comes_back(tmp_path: Path) -> None:
    with cached(tmp_path / "kv", policy="recompute") as (engine, cache):
        context = first_turn(engine)
        lost(engine, cache)
        engine.update_weights(decoder(1).state_dict(), 1)
        cache.set_weights("v1")
        settled(cache)
        assert on_shelves(cache) == []
        heard, computed = second_turn(engine, context)
        holds(heard, decoder(1), context)
        assert computed == len(context) + 4


@pytest.mark.needs("compiler")
def test_another_session_never_gets_a_mixed_cache(tmp_path: Path) -> None:
    with cached(tmp_path / "kv") as (engine, cache):
        context = first_turn(engine)
        engine.update_weights(decoder(1).state_dict(), 1)
        cache.set_weights("v1")
        lost(engine, cache, 1)
        asked = request(9, context, session=SESSION + 1, max_new=5, temperature=0.0)
        heard = run(engine, asked, loading=True)
        holds(heard, decoder(1), context)


@pytest.mark.needs("compiler")
def test_a_session_that_is_lost_twice_has_all_of_it_kept(tmp_path: Path) -> None:
    with cached(tmp_path / "kv") as (engine, cache):
        context = words(5, 300)
        for turn in range(2):
            asked = request(turn, context, session=SESSION, max_new=200, temperature=0.0)
            context = [*context, *run(engine, asked, loading=True).tokens, 7]
            lost(engine, cache)
        starts = {one.header.start_token for one in on_shelves(cache) if one.header is not None}
        assert starts >= set(range(0, 600, CHUNK_TOKENS))
        (shelf,) = cache._tiers
        assert shelf.list_resumable() == {SESSION + 1}
        heard, computed = second_turn(engine, context)
        holds(heard, decoder(), context)
        assert computed < len(context) - CHUNK_TOKENS


@pytest.mark.needs("compiler")
def test_a_session_that_ends_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    with cached(tmp_path / "kv") as (engine, cache):
        first_turn(engine)
        engine.update_weights(decoder(1).state_dict(), 1)
        cache.set_weights("v1")
        lost(engine, cache, 1)
        assert any(cast(ChunkHeader, one.header).session_tag for one in on_shelves(cache))
        engine.release_sessions([SESSION])
        settled(cache)
        assert not any(cast(ChunkHeader, one.header).session_tag for one in on_shelves(cache))


@pytest.mark.needs("compiler")
def test_nothing_is_kept_or_found_while_nobody_knows_the_weights(tmp_path: Path) -> None:
    with cached(tmp_path / "kv", weights="") as (engine, cache):
        context = first_turn(engine)
        lost(engine, cache)
        assert on_shelves(cache) == []
        heard, _ = second_turn(engine, context)
        holds(heard, decoder(), context)


@pytest.mark.needs("compiler")
def test_short_contexts_cost_nothing(tmp_path: Path) -> None:
    with cached(tmp_path / "kv") as (engine, cache):
        for i in range(20):
            run(engine, request(i, words(i, 200), session=i, max_new=2))
        settled(cache)
        assert cache.stats().sought == 0 and on_shelves(cache) == []


LENGTH = 1024
BUDGET = 64 << 20


@contextmanager
def cached(
    directory: Path,
    path: str = "native",
    slots: int = 4,
    policy: str = "keep",
    budget: int = BUDGET,
    weights: str = "v0",
    **more: Any,
) -> Iterator[tuple[BuiltinEngine, HostCache]]:
    """An engine of version 0 with its shelf."""
    clock = SystemClock()
    engine = built_in(path, slots, LENGTH, clock=clock, kv_on_update=policy, **more)
    shelf = KVTier("disk", directory, budget, clock.wall)
    cache = HostCache([shelf], clock, engine, policy, lambda: None, raised)
    engine.prefix_store = cache
    cache.set_weights(weights)
    try:
        yield engine, cache
    finally:
        cache.close()


def settled(cache: HostCache) -> None:
    """All that the engine has let go of is written."""
    assert cache.writer.flush(scaled(20.0))


def on_shelves(cache: HostCache) -> list[StoredChunk]:
    """All chunks that lie there."""
    return [one for shelf in cache._tiers for one in shelf.files.scan()]


def arrived(engine: BuiltinEngine) -> None:
    """All has come that is wanted of what the engine is loading."""
    until = time.monotonic() + scaled(20)
    while any(not load.is_finished for load in engine.scheduler.prefix_loads.active_loads.values()):
        time.sleep(0.001)
        assert time.monotonic() < until, "a load does not end"


def run(engine: BuiltinEngine, asked: GenerationRequest, *, loading: bool = False) -> Heard:
    """What an engine answers, in no hurry: with `loading`, what can come comes after its first
    step."""
    listener = Listener(engine)
    engine.submit([asked])
    engine.step()
    if loading:
        arrived(engine)
    until = time.monotonic() + scaled(20)
    while not listener.of(asked.id).finish:
        if not engine.step():
            time.sleep(0.001)
        listener.drain()
        assert time.monotonic() < until, "it waits for ever"
    return listener.of(asked.id)


def raised(error: BaseException) -> None:
    """A thread has ended by it."""
    raise error
