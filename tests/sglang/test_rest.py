"""A real SGLang that stands, sleeps and wakes: nothing that runs loses a token."""

from __future__ import annotations

import numpy as np
import pytest

from meshrl.common.api.engine import Finish
from meshrl.common.base.errors import Refused
from meshrl.services.engine.sglang.engine import SGLangEngine
from tests.sglang import served
from tests.unit.common.generation.engines_under_test import Listener, built_in, decoder, request

LONG = [request(i, [i, 2], max_new=100, temperature=0.0) for i in range(6)]


def expected() -> dict[int, list[int]]:
    return {i: h.tokens for i, h in Listener(built_in("eager")).run(*LONG).items()}


def started() -> tuple[SGLangEngine, Listener]:
    engine = served.engine()
    engine.submit(LONG)
    while engine.steps < 10 and engine.step():
        pass
    assert 0 < engine.tokens_generated < 600
    return engine, Listener(engine)


def test_a_pause_takes_nothing_and_changes_nothing() -> None:
    engine, listener = started()
    for _ in range(3):
        engine.pause()
        had = engine.tokens_generated
        assert not engine.step() and engine.tokens_generated == had
        engine.resume()
        for _ in range(20):
            engine.step()
    assert {i: h.tokens for i, h in listener.run().items()} == expected()


def test_sleep_with_requests_at_work_and_waking_lose_no_token() -> None:
    engine, listener = started()
    engine.sleep()
    had = engine.tokens_generated
    assert not engine.step() and engine.tokens_generated == had
    with pytest.raises(Refused, match="rests"):
        engine.score(np.array([1, 2, 3], np.int32))
    engine.wake(decoder(0).state_dict(), 0)
    assert {i: h.tokens for i, h in listener.run().items()} == expected()


def test_it_wakes_with_other_weights_and_what_ran_goes_on_under_them() -> None:
    engine, listener = started()
    engine.sleep()
    listener.drain()
    had = {i: len(listener.heard[i].tokens) if i in listener.heard else 0 for i in range(6)}
    engine.wake(decoder(1).state_dict(), 7)
    heard = listener.run()
    other = built_in("eager", seed=1, max_length=256)
    for i, h in heard.items():
        assert h.versions == [0] * had[i] + [7] * (100 - had[i])
        again = request(i, [i, 2, *h.tokens[: had[i]]], max_new=100 - had[i], temperature=0.0)
        assert h.tokens[had[i] :] == Listener(other).run(again)[i].tokens
    assert engine.requests.relabelled == 0


def test_resting_twice_and_resuming_asleep_is_as_once() -> None:
    """As the service does: asleep it is paused too, and resumed before its weights come."""
    engine, listener = started()
    engine.sleep()
    engine.pause()
    engine.resume()
    assert not engine.step()
    engine.wake(decoder(0).state_dict(), 0)
    assert {i: h.tokens for i, h in listener.run().items()} == expected()


def test_what_is_aborted_while_it_stands_ends_at_once_with_what_it_had() -> None:
    engine, listener = started()
    engine.pause()
    engine.abort([0, 5])
    assert engine.ended
    listener.drain()
    assert listener.heard[0].finish == [Finish.ABORTED] and listener.heard[0].tokens
    assert listener.heard[5].finish == [Finish.ABORTED] and listener.heard[5].tokens == []
    engine.resume()
    heard = listener.run()
    whole = expected()
    assert {i: heard[i].tokens for i in (1, 2, 3, 4)} == {i: whole[i] for i in (1, 2, 3, 4)}
    assert heard[0].tokens == whole[0][: len(heard[0].tokens)]
