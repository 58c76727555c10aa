"""What holds for every engine: each token comes once, under the version that sampled it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import Refused
from meshrl.common.generation.engine_contract import TokenEngine
from meshrl.services.engine.sglang.engine import SGLangEngine
from tests.sglang import served
from tests.unit.common.generation.engines_under_test import (
    SCALE,
    VOCAB,
    Listener,
    adapter,
    built_in,
    decoder,
    request,
    simulated,
)

KINDS = (
    pytest.param("native", marks=pytest.mark.needs("compiler")),
    "graphs",
    "simulated",
    pytest.param(
        "sglang",
        marks=[
            pytest.mark.needs("sglang"),
            pytest.mark.group("sglang"),
            pytest.mark.timeout(900),
        ],
    ),
)
UNSEEDED = {"sglang"}  # these sample by chance; greedy, they too repeat what they said


def build(kind: str, slots: int = 4, max_length: int = 128) -> Listener:
    if kind == "sglang":
        return Listener(served.engine(slots, max_length))
    if kind != "simulated":
        return Listener(built_in(kind, slots, max_length))
    return simulated(slots, max_length=max_length, lengths=(12.0, 0.8))[1]


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    served.release()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def listener(kind: str) -> Listener:
    return build(kind)


def steps(listener: Listener, count: int) -> None:
    """Steps until a request that has decoded from the first of them has some `count` tokens."""
    engine = listener.engine
    if isinstance(engine, SGLangEngine):
        until = engine.num_steps + count
        while engine.num_steps < until and engine.step():
            pass
        return
    for _ in range(count):
        engine.step()
        listener.advance()
    engine.step()


def test_a_request_ends_at_its_length(listener: Listener) -> None:
    heard = listener.run(request(1, max_new=7), request(2, max_new=1))
    assert len(heard[1].tokens) == 7 and heard[1].finish == [FinishReason.LENGTH]
    assert len(heard[2].tokens) == 1 and heard[2].finish == [FinishReason.LENGTH]


def test_a_stop_token_ends_it_and_is_included(listener: Listener) -> None:
    stops = tuple(range(0, VOCAB, 4))
    heard = listener.run(*(request(i, max_new=60, stop_ids=stops, seed=i) for i in range(12)))
    stopped = [h for h in heard.values() if h.finish == [FinishReason.STOP]]
    assert len(stopped) > 6
    for h in stopped:
        assert h.tokens[-1] in stops
        assert not set(h.tokens[:-1]) & set(stops)


def test_a_slot_that_is_full_ends_it(listener: Listener) -> None:
    heard = listener.run(request(1, [1] * 120, max_new=99), request(2, [1] * 128, max_new=5))
    assert len(heard[1].tokens) == 8 and heard[1].finish == [FinishReason.LENGTH]
    assert heard[2].tokens == [] and heard[2].finish == [FinishReason.LENGTH]


def test_more_requests_than_slots_all_come_to_an_end(listener: Listener) -> None:
    heard = listener.run(*(request(i, max_new=3 + i % 5) for i in range(23)))
    assert {i: len(h.tokens) for i, h in heard.items()} == {i: 3 + i % 5 for i in range(23)}
    assert all(h.finish == [FinishReason.LENGTH] for h in heard.values())
    assert listener.engine.tokens_generated == sum(3 + i % 5 for i in range(23))
    assert listener.engine.num_running == listener.engine.num_waiting == 0


def test_what_a_request_gets_does_not_depend_on_its_batch(kind: str) -> None:
    asked = request(7, [5, 6, 7], max_new=25, temperature=0.0 if kind in UNSEEDED else 1.0)
    alone = build(kind).run(asked)[7]
    others = [request(i, [i, 3], max_new=10 + i, temperature=0.5 + i / 10) for i in range(20, 26)]
    crowd = build(kind, slots=8).run(*others, asked)[7]
    assert crowd.tokens == alone.tokens
    np.testing.assert_allclose(crowd.logprobs, alone.logprobs, atol=1e-4)


def test_different_seeds_give_different_tokens(kind: str) -> None:
    heard = build(kind).run(request(1, seed=1), request(2, seed=2))
    assert heard[1].tokens != heard[2].tokens


def test_tokens_carry_the_version_that_sampled_them(listener: Listener) -> None:
    engine = listener.engine
    engine.submit([request(1, max_new=110)])
    steps(listener, 10)
    engine.update_weights(decoder(1).state_dict(), 5)
    before = engine.tokens_generated
    heard = listener.run()[1]
    assert engine.version == 5
    assert 0 < before < 110
    assert heard.versions == [0] * before + [5] * (110 - before)


def test_an_aborted_request_brings_what_it_had_and_nothing_more(listener: Listener) -> None:
    engine = listener.engine
    engine.submit([request(i, max_new=110) for i in range(6)])
    steps(listener, 12)
    engine.abort([0, 5, 77])
    heard = listener.run()
    assert heard[0].finish == [FinishReason.ABORTED] and 0 < len(heard[0].tokens) < 110
    assert heard[5].finish == [FinishReason.ABORTED] and heard[5].tokens == []
    assert all(len(heard[i].tokens) == 110 for i in (1, 2, 3, 4))


def test_an_end_is_announced_until_it_is_drained(listener: Listener) -> None:
    engine = listener.engine
    engine.submit([request(1, max_new=60)])
    steps(listener, 3)
    assert not engine.has_finished
    steps(listener, 60)
    assert engine.has_finished
    listener.drain()
    assert not engine.has_finished and engine.drain_outputs() is None


def test_a_paused_engine_stands_still_and_goes_on(listener: Listener) -> None:
    engine = listener.engine
    engine.submit([request(1, max_new=110)])
    steps(listener, 8)
    engine.pause()
    had = engine.tokens_generated
    assert 0 < had < 110
    for _ in range(5):
        listener.advance()
        assert not engine.step()
    assert engine.tokens_generated == had
    engine.resume()
    assert len(listener.run()[1].tokens) == 110


def test_submitting_an_id_again_while_it_is_in_work_changes_nothing(listener: Listener) -> None:
    engine = listener.engine
    engine.submit([request(i, max_new=9) for i in range(6)])
    steps(listener, 3)
    listener.drain()
    in_work = [i for i in range(6) if not listener.of(i).finish]  # a server may have ended some
    heard = listener.run(*(request(i, max_new=9) for i in in_work))
    assert all(len(h.tokens) == 9 for h in heard.values())


@pytest.mark.parametrize("tokens", [[], [-1, 2], [1, VOCAB]])
def test_a_request_that_cannot_be_served_is_refused_with_its_batch(
    listener: Listener, tokens: list[int]
) -> None:
    with pytest.raises(Refused, match="request 2"):
        listener.engine.submit([request(1), request(2, tokens)])
    assert not listener.engine.step()


def test_a_session_that_is_released_while_it_runs_ends_as_usual(listener: Listener) -> None:
    listener.engine.submit([request(1, session=9, max_new=5)])
    steps(listener, 2)
    listener.engine.release_sessions([9, 10])
    assert len(listener.run()[1].tokens) == 5


def test_adapters_are_loaded_beside_the_base_and_tokens_carry_their_versions(
    listener: Listener,
) -> None:
    engine = listener.engine
    if isinstance(engine, SGLangEngine):
        pytest.skip("the server that tests share is not started for adapters")
    engine.load_adapter("a", adapter(1), SCALE, 10)
    engine.load_adapter("b", adapter(2), SCALE, 20)
    assert dict(engine.adapter_versions) == {"a": 10, "b": 20}
    names = ("", "a", "b", "a")
    engine.submit([request(i, max_new=50, adapter=name) for i, name in enumerate(names)])
    steps(listener, 10)
    engine.load_adapter("a", adapter(3), SCALE, 11)
    heard = listener.run(request(9, max_new=5, adapter="a"))
    assert heard[0].versions == [0] * 50 and heard[2].versions == [20] * 50
    for i in (1, 3):
        assert set(heard[i].versions) <= {10, 11} and heard[i].versions[0] == 10
        assert heard[i].versions == sorted(heard[i].versions)
    assert heard[9].versions == [11] * 5 and engine.version == 0


def test_an_adapter_is_not_unloaded_under_its_requests(listener: Listener) -> None:
    engine = listener.engine
    if isinstance(engine, SGLangEngine):
        pytest.skip("the server that tests share is not started for adapters")
    engine.load_adapter("a", adapter(1), SCALE, 10)
    engine.submit([request(1, max_new=100, adapter="a")])
    steps(listener, 5)
    with pytest.raises(Refused, match="in use"):
        engine.unload_adapter("a")
    engine.abort([1])
    heard = listener.run()
    assert heard[1].finish == [FinishReason.ABORTED]
    engine.unload_adapter("a")
    engine.unload_adapter("a")
    assert not engine.adapter_versions
    with pytest.raises(Refused, match="not loaded"):
        engine.submit([request(2, adapter="a")])


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 30), st.integers(-1, 6)),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 12)),
        st.tuples(st.just("drain")),
        st.tuples(st.just("swap")),
        st.tuples(st.just("release"), st.integers(0, 6)),
    ),
    max_size=25,
)


@pytest.mark.rotating(3)
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a name does not wear out
)
@given(script=actions)
def test_whatever_happens_no_token_is_lost_or_doubled(kind: str, script: list) -> None:  # type: ignore[type-arg]
    listener = build(kind, slots=3, max_length=64)
    engine: TokenEngine = listener.engine
    wanted: dict[int, tuple[int, list[int]]] = {}
    aborted: set[int] = set()
    state = decoder(1).state_dict() if kind != "simulated" else {}
    for action, *given_ in script:
        match action:
            case "submit":
                length, max_new, session = given_
                id, context = len(wanted), [(session + i) % VOCAB for i in range(length)]
                wanted[id] = (min(max_new, 64 - length), context)
                engine.submit([request(id, context, max_new=max_new, session=session)])
            case "step":
                steps(listener, given_[0])
            case "abort":
                aborted.add(given_[0])
                engine.abort(given_)
            case "drain":
                listener.drain()
            case "swap":
                engine.update_weights(state, engine.version + 1)
            case "release":
                engine.release_sessions(given_)
    heard = listener.run()
    assert heard.keys() == wanted.keys()
    for id, (length, _) in wanted.items():
        assert len(heard[id].finish) == 1
        assert heard[id].versions == sorted(heard[id].versions)
        if heard[id].finish == [FinishReason.ABORTED]:
            assert id in aborted and len(heard[id].tokens) <= length
        else:
            assert len(heard[id].tokens) == length
    assert engine.tokens_generated == sum(len(h.tokens) for h in heard.values())
