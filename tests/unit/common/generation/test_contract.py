"""Contract tests of all engines: each token is returned once, with the version that sampled it."""

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
    pytest.param("graphs", marks=pytest.mark.rotating(2)),
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
# these sample at random; under greedy sampling they repeat their tokens as well
UNSEEDED = {"sglang"}


def build(kind: str, slots: int = 4, max_length: int = 128) -> Listener:
    if kind == "sglang":
        return Listener(served.engine(slots, max_length))
    if kind != "simulated":
        return Listener(built_in(kind, slots, max_length))
    return simulated(slots, max_length=max_length, lengths=(12.0, 0.8))[1]


@pytest.fixture(autouse=True)
def release_server() -> Iterator[None]:
    yield
    served.release()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def listener(kind: str) -> Listener:
    return build(kind)


def steps(listener: Listener, count: int) -> None:
    """Step until a request that has decoded since the first step has about `count` tokens."""
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


def test_request_ends_at_its_length(listener: Listener) -> None:
    outputs = listener.run(request(1, max_new=7), request(2, max_new=1))
    assert len(outputs[1].tokens) == 7 and outputs[1].finish == [FinishReason.LENGTH]
    assert len(outputs[2].tokens) == 1 and outputs[2].finish == [FinishReason.LENGTH]


def test_stop_token_ends_the_request_and_is_included(listener: Listener) -> None:
    stops = tuple(range(0, VOCAB, 4))
    outputs = listener.run(*(request(i, max_new=60, stop_ids=stops, seed=i) for i in range(12)))
    stopped = [h for h in outputs.values() if h.finish == [FinishReason.STOP]]
    assert len(stopped) > 6
    for h in stopped:
        assert h.tokens[-1] in stops
        assert not set(h.tokens[:-1]) & set(stops)


def test_full_slot_ends_the_request(listener: Listener) -> None:
    outputs = listener.run(request(1, [1] * 120, max_new=99), request(2, [1] * 128, max_new=5))
    assert len(outputs[1].tokens) == 8 and outputs[1].finish == [FinishReason.LENGTH]
    assert outputs[2].tokens == [] and outputs[2].finish == [FinishReason.LENGTH]


def test_more_requests_than_slots_all_finish(listener: Listener) -> None:
    outputs = listener.run(*(request(i, max_new=3 + i % 5) for i in range(23)))
    assert {i: len(h.tokens) for i, h in outputs.items()} == {i: 3 + i % 5 for i in range(23)}
    assert all(h.finish == [FinishReason.LENGTH] for h in outputs.values())
    assert listener.engine.tokens_generated == sum(3 + i % 5 for i in range(23))
    assert listener.engine.num_running == listener.engine.num_waiting == 0


def test_output_does_not_depend_on_the_batch(kind: str) -> None:
    own_request = request(7, [5, 6, 7], max_new=25, temperature=0.0 if kind in UNSEEDED else 1.0)
    single = build(kind).run(own_request)[7]
    others = [request(i, [i, 3], max_new=10 + i, temperature=0.5 + i / 10) for i in range(20, 26)]
    mixed = build(kind, slots=8).run(*others, own_request)[7]
    assert mixed.tokens == single.tokens
    np.testing.assert_allclose(mixed.logprobs, single.logprobs, atol=1e-4)


def test_different_seeds_give_different_tokens(kind: str) -> None:
    outputs = build(kind).run(request(1, seed=1), request(2, seed=2))
    assert outputs[1].tokens != outputs[2].tokens


def test_tokens_carry_the_version_that_sampled_them(listener: Listener) -> None:
    engine = listener.engine
    engine.submit([request(1, max_new=110)])
    steps(listener, 10)
    engine.update_weights(decoder(1).state_dict(), 5)
    old_count = engine.tokens_generated
    output = listener.run()[1]
    assert engine.version == 5
    assert 0 < old_count < 110
    assert output.versions == [0] * old_count + [5] * (110 - old_count)


def test_aborted_request_returns_only_its_tokens_so_far(listener: Listener) -> None:
    engine = listener.engine
    engine.submit([request(i, max_new=110) for i in range(6)])
    steps(listener, 12)
    engine.abort([0, 5, 77])
    outputs = listener.run()
    assert outputs[0].finish == [FinishReason.ABORTED] and 0 < len(outputs[0].tokens) < 110
    assert outputs[5].finish == [FinishReason.ABORTED] and outputs[5].tokens == []
    assert all(len(outputs[i].tokens) == 110 for i in (1, 2, 3, 4))


def test_finished_request_is_signalled_until_it_is_drained(listener: Listener) -> None:
    engine = listener.engine
    engine.submit([request(1, max_new=60)])
    steps(listener, 3)
    assert not engine.has_finished
    steps(listener, 60)
    assert engine.has_finished
    listener.drain()
    assert not engine.has_finished and engine.drain_outputs() is None


def test_paused_engine_stops_and_resumes(listener: Listener) -> None:
    engine = listener.engine
    engine.submit([request(1, max_new=110)])
    steps(listener, 8)
    engine.pause()
    token_count = engine.tokens_generated
    assert 0 < token_count < 110
    for _ in range(5):
        listener.advance()
        assert not engine.step()
    assert engine.tokens_generated == token_count
    engine.resume()
    assert len(listener.run()[1].tokens) == 110


def test_resubmitted_running_request_is_ignored(listener: Listener) -> None:
    engine = listener.engine
    engine.submit([request(i, max_new=9) for i in range(6)])
    steps(listener, 3)
    listener.drain()
    # a server may have finished some already
    running_ids = [i for i in range(6) if not listener.get_output(i).finish]
    outputs = listener.run(*(request(i, max_new=9) for i in running_ids))
    assert all(len(h.tokens) == 9 for h in outputs.values())


@pytest.mark.parametrize("tokens", [[], [-1, 2], [1, VOCAB]])
def test_invalid_request_is_rejected_with_its_batch(listener: Listener, tokens: list[int]) -> None:
    with pytest.raises(Refused, match="request 2"):
        listener.engine.submit([request(1), request(2, tokens)])
    assert not listener.engine.step()


def test_session_released_while_running_finishes(listener: Listener) -> None:
    listener.engine.submit([request(1, session=9, max_new=5)])
    steps(listener, 2)
    listener.engine.release_sessions([9, 10])
    assert len(listener.run()[1].tokens) == 5


def test_tokens_carry_the_version_of_their_adapter(
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
    outputs = listener.run(request(9, max_new=5, adapter="a"))
    assert outputs[0].versions == [0] * 50 and outputs[2].versions == [20] * 50
    for i in (1, 3):
        assert set(outputs[i].versions) <= {10, 11} and outputs[i].versions[0] == 10
        assert outputs[i].versions == sorted(outputs[i].versions)
    assert outputs[9].versions == [11] * 5 and engine.version == 0


def test_adapter_with_running_requests_is_not_unloaded(listener: Listener) -> None:
    engine = listener.engine
    if isinstance(engine, SGLangEngine):
        pytest.skip("the server that tests share is not started for adapters")
    engine.load_adapter("a", adapter(1), SCALE, 10)
    engine.submit([request(1, max_new=100, adapter="a")])
    steps(listener, 5)
    with pytest.raises(Refused, match="in use"):
        engine.unload_adapter("a")
    engine.abort([1])
    outputs = listener.run()
    assert outputs[1].finish == [FinishReason.ABORTED]
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
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # fixtures hold no state
)
@given(script=actions)
def test_no_token_is_lost_or_duplicated_in_any_sequence_of_calls(kind: str, script: list) -> None:  # type: ignore[type-arg]
    listener = build(kind, slots=3, max_length=64)
    engine: TokenEngine = listener.engine
    expected: dict[int, tuple[int, list[int]]] = {}
    aborted: set[int] = set()
    state = decoder(1).state_dict() if kind != "simulated" else {}
    for action, *arguments in script:
        match action:
            case "submit":
                length, max_new, session = arguments
                id, context = len(expected), [(session + i) % VOCAB for i in range(length)]
                expected[id] = (min(max_new, 64 - length), context)
                engine.submit([request(id, context, max_new=max_new, session=session)])
            case "step":
                steps(listener, arguments[0])
            case "abort":
                aborted.add(arguments[0])
                engine.abort(arguments)
            case "drain":
                listener.drain()
            case "swap":
                engine.update_weights(state, engine.version + 1)
            case "release":
                engine.release_sessions(arguments)
    outputs = listener.run()
    assert outputs.keys() == expected.keys()
    for id, (length, _) in expected.items():
        assert len(outputs[id].finish) == 1
        assert outputs[id].versions == sorted(outputs[id].versions)
        if outputs[id].finish == [FinishReason.ABORTED]:
            assert id in aborted and len(outputs[id].tokens) <= length
        else:
            assert len(outputs[id].tokens) == length
    assert engine.tokens_generated == sum(len(h.tokens) for h in outputs.values())
