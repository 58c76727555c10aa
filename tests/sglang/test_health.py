"""The watch over a real SGLang, and requests and pauses that it does not answer for."""

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
from meshrl.services.engine.sglang.control import MAX_FAILURES, RETRACT, HealthWatch, ServerControl
from meshrl.services.engine.sglang.engine import SGLangEngine
from meshrl.services.engine.sglang.weight_transports import create_transport
from tests.load import scaled
from tests.sglang import served
from tests.sglang.processes import scheduler_of
from tests.unit.common.generation.engines_under_test import Listener, built_in, request

POLL_S, ANSWER_S = 0.2, 2.0


@contextmanager
def hanging() -> Iterator[None]:
    scheduler = scheduler_of(served.server().pid)
    os.kill(scheduler, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(scheduler, signal.SIGCONT)


def failure_of(watch: HealthWatch, within_s: float) -> Exception | None:
    waited = threading.Event()
    until = time.monotonic() + within_s
    while watch.find_failure() is None and time.monotonic() < until:
        waited.wait(0.1)
    return watch.find_failure()


def test_a_server_that_stands_or_sleeps_is_not_lost_and_one_that_hangs_is() -> None:
    server = served.server()
    served.release()
    answer_s = scaled(ANSWER_S)
    struck_s = (MAX_FAILURES + 1) * (POLL_S + answer_s)  # one that answers nothing is lost by then
    watch = HealthWatch(server.http, server.get_exit_error, POLL_S, answer_s)
    weights = create_transport(
        "auto", server.http, server.launch_config.model_directory.parent / "weights", 1, "cpu"
    )
    control = ServerControl(server.http, watch, weights)
    try:
        control.pause(RETRACT)
        assert failure_of(watch, struck_s) is None
        control.release_memory()
        assert failure_of(watch, struck_s) is None
        with hanging():
            lost = failure_of(watch, 2 * struck_s)
            assert isinstance(lost, PeerLost) and "in a row" in str(lost)
    finally:
        control.close()


def started(engine: SGLangEngine, max_new: int) -> Listener:
    engine.submit([request(1, [1, 2], max_new=max_new, temperature=0.0)])
    while engine.tokens_generated < 10:
        engine.step()
    return Listener(engine)


def works(engine: SGLangEngine) -> bool:
    """Whether the server has a request at work."""
    loads = served.server().http.call("GET", "/v1/loads", deadline_s=scaled(20.0))["loads"]
    return any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def test_a_request_that_is_ended_here_is_not_left_at_work_there() -> None:
    engine = served.engine(max_length=1000)
    listener = started(engine, 900)
    stream = engine.requests.sent_requests[engine.requests._rids[1]].stream
    assert stream is not None
    with hanging():
        engine.abort([1])
        heard = listener.run()[1]  # until the time for an abort is over
    assert heard.finish == [FinishReason.ABORTED] and len(heard.tokens) >= 10
    assert stream.cancelled()
    waited = threading.Event()
    until = time.monotonic() + scaled(5.0)
    while works(engine):
        assert time.monotonic() < until, "it is left at work"
        waited.wait(0.1)


def test_what_is_aborted_while_it_stands_is_hung_up_on() -> None:
    engine = served.engine(max_length=1000)
    started(engine, 900)
    stream = engine.requests.sent_requests[engine.requests._rids[1]].stream
    assert stream is not None
    engine.pause()
    engine.abort([1])
    assert engine.has_finished and stream.cancelled()


def test_a_pause_that_is_not_answered_is_asked_for_again_and_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = served.engine(max_length=1000)
    listener = started(engine, 400)
    with hanging():
        monkeypatch.setattr("meshrl.services.engine.sglang.control.CONTROL_TIMEOUT_S", 1.5)
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


def test_a_pause_whose_answer_is_lost_is_undone_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server stands, and nothing came back that says so."""
    engine = served.engine()
    listener = started(engine, 100)
    http = served.server().http
    call = http.call

    def lossy(method: str, path: str, body: Any = None, *, deadline_s: float) -> Any:
        answer = call(method, path, body, deadline_s=deadline_s)
        if path == v0_5.PAUSE:
            raise DeadlineExceeded("the answer is lost")
        return answer

    monkeypatch.setattr(http, "call", lossy)
    with pytest.raises(DeadlineExceeded, match="lost"):
        engine.pause()
    monkeypatch.undo()
    assert len(listener.run()[1].tokens) == 100
