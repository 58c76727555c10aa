"""A prefix that is loaded while it is computed: whatever comes, late, in part or never, the engine
goes on as if it had computed all of it."""

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
    StandingClock,
    built_in,
    decoder,
    request,
)
from tests.unit.common.generation.test_builtin_engine import holds, words

pytestmark = pytest.mark.needs("compiler")

LENGTH = 1024


@dataclass
class Shelf:
    """Keeps what engines of one version compute, and brings it when told to."""

    clock: StandingClock
    chunks: dict[bytes, ChunkBytes] = field(default_factory=dict)
    loads: list[tuple[PrefixQuery, PrefixLoad]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

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
        self.ended += sessions

    def bring(self, which: int, start: int) -> bool:
        """Brings a chunk, if it has it and it is wanted."""
        sought, load = self.loads[which]
        content = self.chunks.get(sought.tokens[: start + CHUNK_TOKENS].tobytes())
        if content is None or not load.needs_chunk(start) or start >= load.end:
            return False
        load.add_chunk(start, start + CHUNK_TOKENS, content)
        return True


def shelved(path: str, slots: int = 4, **more: Any) -> tuple[BuiltinEngine, Shelf]:
    clock = StandingClock()
    engine = built_in(path, slots, LENGTH, clock=clock, **more)
    engine.prefix_store = shelf = Shelf(clock)
    return engine, shelf


def other_way(engine: BuiltinEngine) -> None:
    """Takes from the engine all that it has cached, by sleeping."""
    engine.sleep()
    engine.wake(decoder().state_dict(), engine.version)


@pytest.fixture(scope="module")
def engines() -> dict[str, tuple[BuiltinEngine, Shelf]]:
    return {path: shelved(path) for path in BUILT_IN}


cases = given(
    path=st.sampled_from(BUILT_IN),
    length=st.integers(MIN_PREFIX_TOKENS + 1, 900),
    stored=st.integers(0, 900),
    shared=st.integers(0, 600),
    holes=st.sets(st.integers(0, 6)),
    every=st.integers(0, 6),
    fails_after=st.integers(0, 9),
    order=st.sampled_from(("down", "up")),
    expected_s=st.sampled_from((0.0, 0.01, 1.0)),
    stops=st.sampled_from(("ends", "stays silent", "is cancelled")),
    seed=st.integers(0, 10**6),
)


def assert_goes_on(
    engines: dict[str, tuple[BuiltinEngine, Shelf]],
    path: str,
    length: int,
    stored: int,
    shared: int,
    holes: set[int],
    every: int,
    fails_after: int,
    order: str,
    expected_s: float,
    stops: str,
    seed: int,
) -> None:
    engine, shelf = engines[path]
    other_way(engine)
    shelf.chunks.clear()
    shelf.loads.clear()
    context = words(seed, length)
    full = Listener(engine).run(request(1, context, max_new=3, temperature=0.0, seed=4))[1]
    if stored > MIN_PREFIX_TOKENS:  # a request that shares only so much of it
        other_way(engine)
        shelf.chunks = {k: v for k, v in shelf.chunks.items() if len(k) // 4 <= stored}
    other_way(engine)
    if shared:  # what another request has left in the engine's own cache
        Listener(engine).run(request(3, context[:shared], max_new=1, temperature=0.0))
    shelf.loads.clear()
    before = engine.tokens_computed
    listener = Listener(engine)
    engine.submit([request(2, context, max_new=3, temperature=0.0, seed=4)])
    brought, steps, idle = 0, 0, 0
    while not listener.of(2).finish:
        idle = 0 if engine.step() else idle + 1
        steps += 1
        shelf.clock.pass_(0.01)
        listener.drain()
        if not shelf.loads:
            continue
        load = shelf.loads[0][1]
        load.expected_chunk_s = expected_s
        starts = range(0, load.end, CHUNK_TOKENS)
        for _ in range(every if brought < fails_after else 0):
            left = [s for s in starts if s not in load.loaded_spans and load.needs_chunk(s)]
            left = [s for s in left if s // CHUNK_TOKENS not in holes]
            if left and shelf.bring(0, left[-1] if order == "down" else left[0]):
                brought += 1
        if brought >= fails_after or (steps > 50 and not every):
            load.is_finished |= stops == "ends"
        if stops == "is cancelled" and brought >= fails_after:
            engine.abort([2])
            listener.drain()
            break
        assert steps < 400, "it waits for what does not come"
    found = listener.of(2)
    if stops == "is cancelled" and found.finish != full.finish:
        assert not engine.num_running and not engine.scheduler.prefix_loads.active_loads
        return
    assert found.tokens == full.tokens
    np.testing.assert_allclose(found.logprobs, full.logprobs, atol=1e-4)
    loaded = sum(load.num_skipped for _, load in shelf.loads)
    computed = engine.tokens_computed - before
    assert computed <= length + 2 - loaded
    assert shared or computed == length + 2 - loaded


@settings(max_examples=100)
@cases
def test_the_engine_goes_on_as_if_it_had_computed_all(
    engines: dict[str, tuple[BuiltinEngine, Shelf]], **case: Any
) -> None:
    assert_goes_on(engines, **case)


@pytest.mark.deep
@settings(max_examples=500)
@cases
def test_the_engine_goes_on_as_if_it_had_computed_all_in_many_cases(
    engines: dict[str, tuple[BuiltinEngine, Shelf]], **case: Any
) -> None:
    assert_goes_on(engines, **case)


@pytest.mark.parametrize("path", ["native", "graphs"])
def test_those_without_room_do_not_keep_those_that_load_from_going_on(path: str) -> None:
    """A cache for two of five; what the first two load comes in part."""
    engine, shelf = shelved(path, 6, kv_cache_tokens=2 * LENGTH)
    contexts = [words(i, 900) for i in range(5)]
    for i, context in enumerate(contexts):
        Listener(engine).run(request(i, context, max_new=1))
        other_way(engine)
    shelf.loads.clear()
    listener = Listener(engine)
    engine.submit([request(10 + i, c, max_new=4, session=i) for i, c in enumerate(contexts)])
    engine.step()
    for which, (_, load) in enumerate(shelf.loads[:2]):
        for start in (768, 640, 256):
            shelf.bring(which, start)
        load.is_finished = True
    steps = 0
    while engine.num_running or engine.num_waiting:
        engine.step()
        listener.drain()
        for _, load in shelf.loads[2:]:
            load.is_finished = True
        steps += 1
        assert steps < 500, "they wait for each other"
    for i, context in enumerate(contexts):
        holds(listener.of(10 + i), decoder(), context)


@pytest.mark.rotating(4)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_while_others_press_every_token_is_right(seed: int) -> None:
    """Conversations that share a prompt, in a cache for a few; chunks come and fail at random."""
    random = np.random.default_rng(seed)
    engine, shelf = shelved("native", 4, kv_cache_tokens=LENGTH + 60 * seed, steps=4, budget_s=60.0)
    contexts = {session: words(session % 2, 600 + 50 * session) for session in range(5)}
    loaded = 0
    for turn in range(12):
        chosen = random.choice(5, 3, replace=False).tolist()
        listener = Listener(engine)
        ids = {session: 100 * turn + session for session in chosen}
        shelf.loads.clear()
        engine.submit(
            [request(ids[s], contexts[s], session=s, max_new=int(random.integers(1, 30)))
             for s in chosen]
        )  # fmt: skip
        steps = 0
        while engine.num_running or engine.num_waiting:
            engine.step()
            shelf.clock.pass_(0.01)
            for which, (_, load) in enumerate(shelf.loads):
                load.expected_chunk_s = 0.02
                for start in range(768, 128, -CHUNK_TOKENS):
                    if random.random() < 0.5:
                        shelf.bring(which, start)
                load.is_finished |= random.random() < 0.2
            listener.drain()
            steps += 1
            assert steps < 2000, "they wait for each other"
        loaded += sum(load.num_skipped for _, load in shelf.loads)
        for session in chosen:
            heard = listener.of(ids[session])
            holds(heard, decoder(), contexts[session])
            more = words(turn, 20)
            contexts[session] = [*contexts[session], *heard.tokens, *more][:900]
    assert loaded >= CHUNK_TOKENS


@given(
    computed=st.integers(0, 2000),
    ahead=st.integers(0, 20),
    most=st.integers(1, 512),
    rate=st.sampled_from((0.0, 10.0, 1e3, 1e6)),
    expected_s=st.sampled_from((0.0, 1e-6, 0.01, 10.0)),
    silent_s=st.floats(0, 100),
)
def test_it_waits_only_for_what_can_come_and_not_for_long(
    computed: int, ahead: int, most: int, rate: float, expected_s: float, silent_s: float
) -> None:
    placed = (computed // CHUNK_TOKENS + 1 + ahead) * CHUNK_TOKENS
    load = PrefixLoad(0, placed + CHUNK_TOKENS, 0.0)
    load.loaded_spans[placed], load.claimed_end, load.expected_chunk_s = (
        placed + CHUNK_TOKENS,
        computed,
        expected_s,
    )
    count = load.plan_compute_tokens(computed, most, rate, silent_s)
    assert 0 <= count <= min(most, placed - computed)
    comes = [start for start in range(0, placed, CHUNK_TOKENS) if load.needs_chunk(start)]
    assert count or comes
    if not count:
        assert silent_s <= CHUNK_TOKENS / rate, "it could have computed a chunk meanwhile"
    if count < most:
        assert (computed + count) % CHUNK_TOKENS == 0
    load.is_finished = True
    assert load.plan_compute_tokens(computed, most, rate, silent_s) == min(most, placed - computed)
