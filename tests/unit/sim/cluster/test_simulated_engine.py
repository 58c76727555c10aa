"""A simulated engine takes what its steps take, one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.state.pool.demand.measured import Curve
from meshrl.sim.cluster.model.agenda import Agenda
from meshrl.sim.cluster.model.engine import SimEngine, SimRequest


@dataclass(frozen=True)
class Linear:
    """A step of a base, of sequences, and of their context."""

    base_s: float = 1.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    token_s: float = 0.0  # of prefill
    room: float = math.inf

    def step_s(self, batch: float, context: float) -> float:
        return self.base_s + batch * (self.sequence_s + context * self.context_s)

    def prefill_s(self, tokens: float, before: float = 0.0) -> float:
        return tokens * self.token_s

    def capacity(self) -> float:
        return self.room

    @property
    def plateau(self) -> int:
        return 0

    def curve(self, steps: int) -> Curve:
        return Curve("cpu", 1, self.base_s, self.sequence_s, self.context_s, steps=steps)


class Bench:
    """An engine, and when its requests ended."""

    def __init__(self, speed: Linear, slots: int = 8) -> None:
        self.agenda = Agenda()
        self.engine = SimEngine("e", self.agenda, speed, slots)
        self.ended_s: dict[str, float] = {}

    def request(
        self, name: str, tokens: float, context: float = 0.0, cached: float = 0.0
    ) -> SimRequest:
        return SimRequest(tokens, context, cached, lambda: self._ended(name))

    def _ended(self, name: str) -> None:
        self.ended_s[name] = self.agenda.now_s

    def run(self, until_s: float = 1e9) -> None:
        self.agenda.run(until_s, lambda: False)


def test_a_request_takes_its_tokens_one_after_the_other() -> None:
    bench = Bench(Linear(base_s=0.5))
    bench.engine.submit(bench.request("a", 10))
    bench.run()
    assert bench.ended_s == {"a": pytest.approx(5.0)}
    assert bench.engine.tokens == pytest.approx(10) and bench.engine.busy_s == pytest.approx(5.0)


def test_a_prefill_holds_up_everybody_and_a_cache_spares_it() -> None:
    bench = Bench(Linear(base_s=1.0, token_s=0.1))
    bench.engine.submit(bench.request("a", 10))
    bench.agenda.at(4.0, lambda: bench.engine.submit(bench.request("b", 3, context=20)))
    bench.agenda.at(8.0, lambda: bench.engine.submit(bench.request("c", 1, 50, cached=50)))
    bench.run()
    assert bench.ended_s["a"] == pytest.approx(12.0)  # 2 s of prefill within
    assert bench.ended_s["b"] == pytest.approx(9.0)
    assert bench.ended_s["c"] == pytest.approx(9.0)
    assert bench.engine.prefilled == 20


def test_who_finds_no_slot_waits_for_one() -> None:
    bench = Bench(Linear(), slots=2)
    for name, tokens in (("a", 5), ("b", 3), ("c", 4)):
        bench.engine.submit(bench.request(name, tokens))
    assert (bench.engine.running, bench.engine.waiting) == (2, 1)
    bench.run()
    assert bench.ended_s == {"b": 3.0, "a": 5.0, "c": 7.0}


def test_who_finds_no_room_for_keys_and_values_waits_for_it() -> None:
    bench = Bench(Linear(room=100))
    bench.engine.submit(bench.request("a", 40, context=30))
    bench.engine.submit(bench.request("b", 10, context=40))  # 30 + 50 would fit, 70 + 50 will not
    bench.engine.submit(bench.request("c", 50, context=40))
    assert (bench.engine.running, bench.engine.waiting) == (2, 1)
    bench.run()
    assert bench.ended_s == {"b": 10.0, "a": 40.0, "c": 90.0}


def test_what_was_made_of_a_request_goes_with_it() -> None:
    bench = Bench(Linear(base_s=0.5))
    one, other = bench.request("a", 10, context=4), bench.request("b", 10)
    bench.engine.submit(one)
    bench.engine.submit(other)
    bench.run(2.0)
    bench.engine.release(one)
    assert (one.made, one.left, one.context) == (4.0, 6.0, 8.0)
    bench.run(3.0)
    assert bench.engine.clear() == [other] and other.made == pytest.approx(6.0)
    bench.run()
    assert not bench.ended_s


def test_an_engine_that_stands_decodes_nothing() -> None:
    bench = Bench(Linear())
    bench.engine.submit(bench.request("a", 10))
    bench.agenda.at(4.0, lambda: bench.engine.stand(2.5))
    bench.run()
    assert bench.ended_s == {"a": 12.5}


@settings(deadline=None, max_examples=60)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(0, 50)),
        min_size=1,
        max_size=12,
    ),
    slots=st.integers(1, 4),
)
def test_it_ends_when_steps_that_are_counted_one_by_one_end(
    arrivals: list[tuple[int, int, int]], slots: int
) -> None:
    """Where a step takes as long whatever is in it, and all come between two steps."""
    bench = Bench(Linear(), slots)
    order = sorted(range(len(arrivals)), key=lambda n: arrivals[n][0])
    for n in order:
        at_s, tokens, context = arrivals[n]
        request = bench.request(str(n), tokens, context)
        bench.agenda.at(float(at_s), partial(bench.engine.submit, request))
    bench.run()
    waiting, now = list(order), 0
    running: dict[int, int] = {}
    expected: dict[str, float] = {}
    while waiting or running:
        for n in [n for n in waiting if arrivals[n][0] <= now][: slots - len(running)]:
            waiting.remove(n)
            running[n] = arrivals[n][1]
        now += 1
        for n in list(running):
            running[n] -= 1
            if not running[n]:
                del running[n]
                expected[str(n)] = float(now)
    assert bench.ended_s == pytest.approx(expected)
