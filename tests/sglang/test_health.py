"""Health watch of a real SGLang server, and requests and pauses that it does not answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import DeadlineExceeded, PeerLost
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.control import MAX_FAILURES, HealthWatch, ServerControl
from meshrl.services.engine.sglang.engine import SGLangEngine
from meshrl.services.engine.sglang.weight_push import WeightPush
from meshrl.services.engine.sglang.weight_transports import create_transport
from tests.load import scaled
from tests.sglang import served
from tests.sglang.processes import scheduler_of
from tests.unit.common.generation.engines_under_test import Listener, built_in, request

POLL_S, ANSWER_S = 0.2, 2.0


@contextmanager
def serve_without_answers() -> Iterator[None]:
    scheduler = scheduler_of(served.server().pid)
    os.kill(scheduler, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(scheduler, signal.SIGCONT)


def wait_for_failure(watch: HealthWatch, within_s: float) -> Exception | None:
    waited = threading.Event()
    until = time.monotonic() + within_s
    while watch.find_failure() is None and time.monotonic() < until:
        waited.wait(0.1)
    return watch.find_failure()


def test_paused_or_sleeping_server_is_alive_and_hanging_one_is_lost() -> None:
    server = served.server()
    served.release()
    answer_s = scaled(ANSWER_S)
    lost_after_s = (MAX_FAILURES + 1) * (
        POLL_S + answer_s
    )  # a server without answers is lost by then
    watch = HealthWatch(server.http, server.get_exit_error, POLL_S, answer_s)
    choice = server.choose_transport("auto")
    weights = create_transport(choice, server.http, server.launch_config.directory / "weights", 1)
    control = ServerControl(server.http, watch, WeightPush(choice, weights))
    try:
        control.pause()
        assert wait_for_failure(watch, lost_after_s) is None
        control.release_memory()
        assert wait_for_failure(watch, lost_after_s) is None
        with serve_without_answers():
            lost = wait_for_failure(watch, 2 * lost_after_s)
            assert isinstance(lost, PeerLost) and "in a row" in str(lost)
    finally:
        control.close()


def start_request(engine: SGLangEngine, max_new: int) -> Listener:
    engine.submit([request(1, [1, 2], max_new=max_new, temperature=0.0)])
    while engine.tokens_generated < 10:
        engine.step()
    return Listener(engine)


def is_busy(engine: SGLangEngine) -> bool:
    """Return True if the server has a request at work."""
    loads = served.server().http.call("GET", "/v1/loads", deadline_s=scaled(20.0))["loads"]
    return any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def test_request_ended_by_the_engine_is_aborted_at_the_server() -> None:
    engine = served.engine(max_length=1000)
    listener = start_request(engine, 900)
    stream = engine.requests.sent_requests[engine.requests._rids[1]].stream
    assert stream is not None
    with serve_without_answers():
        engine.abort([1])
        heard = listener.run()[1]  # until the deadline of an abort
    assert heard.finish == [FinishReason.ABORTED] and len(heard.tokens) >= 10
    assert stream.cancelled()
    waited = threading.Event()
    until = time.monotonic() + scaled(5.0)
    while is_busy(engine):
        assert time.monotonic() < until, "it is left at work"
        waited.wait(0.1)


def test_abort_during_a_pause_ends_a_withdrawn_request() -> None:
    engine = served.engine(max_length=1000)
    start_request(engine, 900)
    engine.pause()
    assert not is_busy(engine) and engine.num_waiting == 1
    engine.abort([1])
    assert engine.has_finished


def test_unanswered_pause_is_retried_and_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = served.engine(max_length=1000)
    listener = start_request(engine, 400)
    with serve_without_answers():
        monkeypatch.setattr("meshrl.services.engine.sglang.engine.CONTROL_TIMEOUT_S", 1.5)
        with pytest.raises(DeadlineExceeded):
            engine.pause()
        monkeypatch.undo()
    engine.pause()
    had = engine.tokens_generated
    assert not engine.step() and engine.tokens_generated == had
    engine.resume()
    expected = Listener(built_in("eager", max_length=1000)).run(
        request(1, [1, 2], max_new=400, temperature=0.0)
    )
    assert listener.run()[1].tokens == expected[1].tokens


def test_pause_with_a_lost_answer_is_undone_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lose the answer to a pause that the server executed."""
    engine = served.engine()
    listener = start_request(engine, 100)
    http = served.server().http
    call = http.call

    def lose_pause_answer(method: str, path: str, body: Any = None, *, deadline_s: float) -> Any:
        answer = call(method, path, body, deadline_s=deadline_s)
        if path == v0_5.PAUSE:
            raise DeadlineExceeded("the answer is lost")
        return answer

    monkeypatch.setattr(http, "call", lose_pause_answer)
    with pytest.raises(DeadlineExceeded, match="lost"):
        engine.pause()
    monkeypatch.undo()
    assert len(listener.run()[1].tokens) == 100
