"""Host cache of an engine: offloaded KV returns and equals the KV that left the engine's cache."""

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
    CollectedOutput,
    Listener,
    adapter,
    built_in,
    decoder,
    request,
)
from tests.unit.common.generation.test_builtin_engine import assert_matches_model, words

SESSION, PROMPT = 3, 700


def first_turn(engine: BuiltinEngine, **more: Any) -> list[int]:
    """Return the session's context after its first turn and a tool's answer."""
    context = words(5, PROMPT)
    heard = run(engine, request(1, context, session=SESSION, max_new=6, seed=9, **more))
    return [*context, *heard.tokens, 7, 8]


def second_turn(
    engine: BuiltinEngine, context: list[int], **more: Any
) -> tuple[CollectedOutput, int]:
    """Return the engine's output and the number of tokens that it computed after loading."""
    before = engine.tokens_computed
    generation_request = request(
        2, context, session=SESSION, max_new=5, seed=11, temperature=0.0, **more
    )
    heard = run(engine, generation_request, loading=True)
    return heard, engine.tokens_computed - before


def clear_engine_cache(engine: BuiltinEngine, cache: HostCache, version: int = 0) -> None:
    """Empty the engine's own cache: let it sleep and wake."""
    engine.sleep()
    engine.wake(decoder(version).state_dict(), version)
    wait_until_written(cache)


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("path", BUILT_IN)
def test_session_continues_after_its_engine_slept(tmp_path: Path, path: str) -> None:
    with create_cached_engine(tmp_path / "kv", path) as (engine, cache):
        context = first_turn(engine)
        clear_engine_cache(engine, cache)
        heard, computed = second_turn(engine, context)
        assert_matches_model(heard, decoder(), context)
        assert computed < len(context) - CHUNK_TOKENS
        stats = cache.stats()
        assert stats.loaded_tokens["disk"] >= CHUNK_TOKENS and stats.saved_s > 0


@pytest.mark.needs("compiler")
def test_session_continues_after_its_slot_was_reused(tmp_path: Path) -> None:
    with create_cached_engine(tmp_path / "kv", slots=2, kv_cache_tokens=LENGTH + 64) as (
        engine,
        cache,
    ):
        context = first_turn(engine)
        for other in range(10, 13):
            run(engine, request(other, words(other, 600), session=other, max_new=2))
        wait_until_written(cache)
        heard, _ = second_turn(engine, context)
        assert_matches_model(heard, decoder(), context)
        assert cache.stats().loaded_tokens["disk"] >= CHUNK_TOKENS


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("path", ["native", "graphs"])
def test_preempted_requests_are_reloaded(tmp_path: Path, path: str) -> None:
    """Run three requests that grow in a cache with room for one and a half."""
    with create_cached_engine(tmp_path / "kv", path, kv_cache_tokens=LENGTH + 400) as (
        engine,
        cache,
    ):
        listener = Listener(engine)
        generation_request = [
            request(i, words(i, 650), max_new=150, temperature=0.0) for i in range(3)
        ]
        engine.submit(generation_request)
        while engine.num_running or engine.num_waiting:
            engine.step()
            wait_until_written(cache)
            wait_until_loaded(engine)
            listener.drain()
        for i in range(3):
            assert_matches_model(listener.get_output(i), decoder(), words(i, 650))
        assert engine.num_preempted and cache.stats().loaded_tokens["disk"] >= CHUNK_TOKENS


@pytest.mark.needs("compiler")
def test_engines_of_one_host_share_their_kv(tmp_path: Path) -> None:
    """Load a computed prompt and a moved session in the other engine."""
    with (
        create_cached_engine(tmp_path / "kv") as (one, first),
        create_cached_engine(tmp_path / "kv") as (two, second),
    ):
        context = first_turn(one)
        wait_until_written(first)
        heard, computed = second_turn(two, context)
        assert_matches_model(heard, decoder(), context)
        # The part that arrives before it is computed here depends on the load of the host.
        assert second.stats().loaded_tokens["disk"] >= CHUNK_TOKENS
        assert computed < len(context)


@pytest.mark.needs("compiler")
def test_closed_engine_leaves_its_kv_to_the_others(tmp_path: Path) -> None:
    with (
        create_cached_engine(tmp_path / "kv") as (one, first),
        create_cached_engine(tmp_path / "kv") as (two, second),
    ):
        context = words(5, 300)
        generated = run(
            one, request(1, context, session=SESSION, max_new=600, temperature=0.0)
        ).tokens
        context = [*context, *generated, 7]
        first.offload_all()
        wait_until_written(first)
        heard, computed = second_turn(two, context)
        assert_matches_model(heard, decoder(), context)
        assert computed < len(context) - CHUNK_TOKENS
        assert any(
            one.header.start_token > 300 for one in list_chunks(second) if one.header is not None
        )


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("other", ["weights", "policy", "layout", "adapter"])
def test_kv_of_a_different_domain_is_not_loaded(tmp_path: Path, other: str) -> None:
    there: dict[str, Any] = {"weights": "v1"} if other == "weights" else {}
    policy = "recompute" if other == "policy" else "keep"
    path = "graphs" if other == "layout" else "native"
    with (
        create_cached_engine(tmp_path / "kv") as (one, first),
        create_cached_engine(tmp_path / "kv", path, policy=policy, **there) as (two, second),
    ):
        context = first_turn(one)
        clear_engine_cache(one, first)
        more = {}
        if other == "adapter":
            two.load_adapter("a", adapter(1), SCALE, 10)
            more = {"adapter": "a"}
        heard, computed = second_turn(two, context, **more)
        assert not second.stats().loaded_tokens and computed == len(context) + 4
        if other != "adapter":
            assert_matches_model(heard, decoder(), context)


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("harm", [_flip, Path.unlink, lambda p: p.write_bytes(b"short")])
def test_corrupt_chunks_are_recomputed(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    with create_cached_engine(tmp_path / "kv") as (engine, cache):
        context = first_turn(engine)
        clear_engine_cache(engine, cache)
        files = [one.path for one in list_chunks(cache)]
        assert len(files) >= PROMPT // CHUNK_TOKENS
        for path in files:
            harm(path)
        heard, computed = second_turn(engine, context)
        assert_matches_model(heard, decoder(), context)
        assert computed == len(context) + 4 and not cache.stats().loaded_tokens


# -- versions ------------------------------------------------------------------------------------


@pytest.mark.needs("compiler")
@pytest.mark.rotating(3)
@pytest.mark.parametrize("path", BUILT_IN)
@pytest.mark.parametrize("mixed", [False, True])
def test_kv_of_older_weights_is_unchanged(tmp_path: Path, path: str, mixed: bool) -> None:
    """Run a turn under version 0, with `mixed` another under 1, and the last under 1 or 2."""
    with (
        create_cached_engine(tmp_path / "kv", path) as (engine, cache),
        create_cached_engine(tmp_path / "other", path) as (stayed, _),
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
        clear_engine_cache(
            engine, cache, 1 if mixed else 0
        )  # the offloaded KV is of the previous weights
        for each in (engine, stayed):
            each.update_weights(decoder(last).state_dict(), last)
        cache.set_weights(f"v{last}")
        wait_until_written(cache)
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
def test_recompute_policy_loads_no_kv_of_older_weights(tmp_path: Path) -> None:
    with create_cached_engine(tmp_path / "kv", policy="recompute") as (engine, cache):
        context = first_turn(engine)
        clear_engine_cache(engine, cache)
        engine.update_weights(decoder(1).state_dict(), 1)
        cache.set_weights("v1")
        wait_until_written(cache)
        assert list_chunks(cache) == []
        heard, computed = second_turn(engine, context)
        assert_matches_model(heard, decoder(1), context)
        assert computed == len(context) + 4


@pytest.mark.needs("compiler")
def test_kv_of_mixed_versions_stays_with_its_session(tmp_path: Path) -> None:
    with create_cached_engine(tmp_path / "kv") as (engine, cache):
        context = first_turn(engine)
        engine.update_weights(decoder(1).state_dict(), 1)
        cache.set_weights("v1")
        clear_engine_cache(engine, cache, 1)
        generation_request = request(9, context, session=SESSION + 1, max_new=5, temperature=0.0)
        heard = run(engine, generation_request, loading=True)
        assert_matches_model(heard, decoder(1), context)


@pytest.mark.needs("compiler")
def test_session_offloaded_twice_is_stored_completely(tmp_path: Path) -> None:
    with create_cached_engine(tmp_path / "kv") as (engine, cache):
        context = words(5, 300)
        for turn in range(2):
            generation_request = request(
                turn, context, session=SESSION, max_new=200, temperature=0.0
            )
            context = [*context, *run(engine, generation_request, loading=True).tokens, 7]
            clear_engine_cache(engine, cache)
        starts = {one.header.start_token for one in list_chunks(cache) if one.header is not None}
        assert starts >= set(range(0, 600, CHUNK_TOKENS))
        (tier,) = cache._tiers
        assert tier.list_resumable() == {SESSION + 1}
        heard, computed = second_turn(engine, context)
        assert_matches_model(heard, decoder(), context)
        assert computed < len(context) - CHUNK_TOKENS


@pytest.mark.needs("compiler")
def test_ended_session_leaves_no_chunks(tmp_path: Path) -> None:
    with create_cached_engine(tmp_path / "kv") as (engine, cache):
        first_turn(engine)
        engine.update_weights(decoder(1).state_dict(), 1)
        cache.set_weights("v1")
        clear_engine_cache(engine, cache, 1)
        assert any(cast(ChunkHeader, one.header).session_tag for one in list_chunks(cache))
        engine.release_sessions([SESSION])
        wait_until_written(cache)
        assert not any(cast(ChunkHeader, one.header).session_tag for one in list_chunks(cache))


@pytest.mark.needs("compiler")
def test_unknown_weights_store_and_find_no_kv(tmp_path: Path) -> None:
    with create_cached_engine(tmp_path / "kv", weights="") as (engine, cache):
        context = first_turn(engine)
        clear_engine_cache(engine, cache)
        assert list_chunks(cache) == []
        heard, _ = second_turn(engine, context)
        assert_matches_model(heard, decoder(), context)


@pytest.mark.needs("compiler")
def test_short_contexts_are_neither_stored_nor_sought(tmp_path: Path) -> None:
    with create_cached_engine(tmp_path / "kv") as (engine, cache):
        for i in range(20):
            run(engine, request(i, words(i, 200), session=i, max_new=2))
        wait_until_written(cache)
        assert cache.stats().lookup_tokens == 0 and list_chunks(cache) == []


LENGTH = 1024
BUDGET = 64 << 20


@contextmanager
def create_cached_engine(
    directory: Path,
    path: str = "native",
    slots: int = 4,
    policy: str = "keep",
    budget: int = BUDGET,
    weights: str = "v0",
    **more: Any,
) -> Iterator[tuple[BuiltinEngine, HostCache]]:
    """Create an engine of version 0 with its KV tier."""
    clock = SystemClock()
    engine = built_in(path, slots, LENGTH, clock=clock, kv_on_update=policy, **more)
    tier = KVTier("disk", directory, budget, clock.wall)
    cache = HostCache([tier], clock, engine, policy, lambda: None, raise_error)
    engine.prefix_store = cache
    cache.set_weights(weights)
    try:
        yield engine, cache
    finally:
        cache.close()


def wait_until_written(cache: HostCache) -> None:
    """Wait until all offloaded chunks are written."""
    assert cache.writer.flush(scaled(20.0))


def list_chunks(cache: HostCache) -> list[StoredChunk]:
    """Return all chunks in the tiers."""
    return [one for tier in cache._tiers for one in tier.files.scan()]


def wait_until_loaded(engine: BuiltinEngine) -> None:
    """Wait until the chunks that the engine is loading have arrived."""
    until = time.monotonic() + scaled(20)
    while any(not load.is_finished for load in engine.scheduler.prefix_loads.active_loads.values()):
        time.sleep(0.001)
        assert time.monotonic() < until, "a load does not end"


def run(
    engine: BuiltinEngine, generation_request: GenerationRequest, *, loading: bool = False
) -> CollectedOutput:
    """Return the engine's output; with `loading`, wait for loads after the first step."""
    listener = Listener(engine)
    engine.submit([generation_request])
    engine.step()
    if loading:
        wait_until_loaded(engine)
    until = time.monotonic() + scaled(20)
    while not listener.get_output(generation_request.id).finish:
        if not engine.step():
            time.sleep(0.001)
        listener.drain()
        assert time.monotonic() < until, "it waits for ever"
    return listener.get_output(generation_request.id)


def raise_error(error: BaseException) -> None:
    """Raise an error in place of a thread's failure report."""
    raise error
