"""A prefix that is loaded while it is computed: whatever comes, late, in part or never, the engine
goes on as if it had computed all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.generation.builtin.build import TorchEngine
from common.generation.builtin.loading import CHUNK, WORTH, Content, Kept, Loading, Sought
from tests.unit.common.generation.engines_under_test import (
    BUILT_IN,
    Listener,
    StandingClock,
    built_in,
    decoder,
    request,
)
from tests.unit.common.generation.test_torch_engine import words

pytestmark = pytest.mark.needs("compiler")

LENGTH = 1024


@dataclass
class Shelf:
    """Keeps what engines of one version compute, and brings it when told to."""

    clock: StandingClock
    chunks: dict[bytes, Content] = field(default_factory=dict)
    loads: list[tuple[Sought, Loading]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def find(self, sought: Sought) -> Loading | None:
        end = (len(sought.tokens) - 1) // CHUNK * CHUNK
        load = Loading(sought.computed, end, self.clock.monotonic())
        self.loads.append((sought, load))
        return load

    def keep(self, kept: Kept) -> None:
        for start in range(0, len(kept.tokens) // CHUNK * CHUNK if kept.pure else 0, CHUNK):
            name = kept.tokens[: start + CHUNK].tobytes()
            self.chunks.setdefault(name, kept.read(start, start + CHUNK))

    def release(self, sessions: Sequence[int]) -> None:
        self.ended += sessions

    def bring(self, which: int, start: int) -> bool:
        """Brings a chunk, if it has it and it is wanted."""
        sought, load = self.loads[which]
        content = self.chunks.get(sought.tokens[: start + CHUNK].tobytes())
        if content is None or not load.wants(start) or start >= load.end:
            return False
        load.bring(start, start + CHUNK, content)
        return True


def shelved(path: str, slots: int = 4, **more: int) -> tuple[TorchEngine, Shelf]:
    clock = StandingClock()
    engine = built_in(path, slots, LENGTH, clock=clock, **more)
    engine.prefixes = shelf = Shelf(clock)
    return engine, shelf


def other_way(engine: TorchEngine) -> None:
    """Takes from the engine all that it has cached, by sleeping."""
    engine.sleep()
    engine.wake(decoder().state_dict(), engine.version)


@pytest.fixture(scope="module")
def engines() -> dict[str, tuple[TorchEngine, Shelf]]:
    return {path: shelved(path) for path in BUILT_IN}


@settings(max_examples=500)
@given(
    path=st.sampled_from(BUILT_IN),
    length=st.integers(WORTH + 1, 900),
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
def test_the_engine_goes_on_as_if_it_had_computed_all(
    engines: dict[str, tuple[TorchEngine, Shelf]],
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
    shelf.chunks.clear(), shelf.loads.clear()
    context = words(seed, length)
    full = Listener(engine).run(request(1, context, max_new=3, temperature=0.0, seed=4))[1]
    if stored > WORTH:  # a request that shares only so much of it
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
        load.expected_s = expected_s
        starts = range(0, load.end, CHUNK)
        for _ in range(every if brought < fails_after else 0):
            left = [s for s in starts if s not in load.placed and load.wants(s)]
            left = [s for s in left if s // CHUNK not in holes]
            if left and shelf.bring(0, left[-1] if order == "down" else left[0]):
                brought += 1
        if brought >= fails_after or (steps > 50 and not every):
            load.over |= stops == "ends"
        if stops == "is cancelled" and brought >= fails_after:
            engine.abort([2])
            listener.drain()
            break
        assert steps < 400, "it waits for what does not come"
    found = listener.of(2)
    if stops == "is cancelled" and found.finish != full.finish:
        assert not engine.running and not engine._loads
        return
    assert found.tokens == full.tokens
    np.testing.assert_allclose(found.logprobs, full.logprobs, atol=1e-4)
    loaded = sum(load.loaded for _, load in shelf.loads)
    computed = engine.tokens_computed - before
    assert computed <= length + 2 - loaded
    assert shared or computed == length + 2 - loaded


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
    placed = (computed // CHUNK + 1 + ahead) * CHUNK
    load = Loading(0, placed + CHUNK, 0.0)
    load.placed[placed], load.claimed, load.expected_s = placed + CHUNK, computed, expected_s
    count = load.stretch(computed, most, rate, silent_s)
    assert 0 <= count <= min(most, placed - computed)
    comes = [start for start in range(0, placed, CHUNK) if load.wants(start)]
    assert count or comes
    if not count:
        assert silent_s <= CHUNK / rate, "it could have computed a chunk meanwhile"
    if count < most:
        assert (computed + count) % CHUNK == 0
    load.over = True
    assert load.stretch(computed, most, rate, silent_s) == min(most, placed - computed)
