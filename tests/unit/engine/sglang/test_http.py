"""HTTP calls and streams of the SGLang adapter against a small server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import assume, given
from hypothesis import strategies as st

from meshrl.common.api.engine import FinishReason, LogitAdjustments
from meshrl.common.base.errors import DeadlineExceeded, MeshError, PeerLost, Refused, RemoteFailure
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.http_client import EXTRA_CONNECTIONS, KEEPALIVE_S, HttpClient
from meshrl.services.engine.sglang.sent_request import SentRequest
from meshrl.services.engine.sglang.stream_interval import TokenRate, choose_stream_interval
from meshrl.services.engine.sglang.v0_5 import (
    StreamChunk,
    build_generate_body,
    check_sampling,
    is_plain_sampling,
    parse_chunk,
)
from tests.load import scaled
from tests.unit.common.generation.engines_under_test import VOCAB, request, text_of

SLOTS = 2
SOON_S = 5.0

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LoopbackServer:
    """Server that answers every path with one function, and its client."""

    def __init__(self, url: str, http: HttpClient, peers: list[Any]) -> None:
        self.url, self.http = url, http
        self.peers = peers  # client address of each request

    def call(self, path: str, deadline_s: float = 0.0) -> Awaitable[Any]:
        """Call as the engine's thread does."""
        deadline_s = deadline_s or scaled(SOON_S)
        return asyncio.to_thread(self.http.call, "POST", path, {}, deadline_s=deadline_s)


@asynccontextmanager
async def serve(answer: Answering) -> AsyncIterator[LoopbackServer]:
    peers: list[Any] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    served = LoopbackServer(url, HttpClient(url, SLOTS), peers)
    try:
        yield served
    finally:
        await served.http.close()
        await runner.cleanup()


async def echo(request: web.Request) -> web.Response:
    return web.json_response({"path": request.path, "body": await request.json()})


async def reject_request(request: web.Request) -> web.Response:
    return web.Response(status=400, text="no such weights")


async def never_answer(request: web.Request) -> web.Response:
    await asyncio.sleep(3600.0)
    return web.Response()


async def abort_connection(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_answer_is_decoded_and_empty_answer_is_none() -> None:
    async with serve(echo) as served:
        assert await served.call("/pause") == {"path": "/pause", "body": {}}

    async def nothing(request: web.Request) -> web.Response:
        return web.Response()

    async with serve(nothing) as served:
        assert await served.call("/abort") is None


@pytest.mark.parametrize(
    ("answer", "kind", "expected_text"),
    [
        (reject_request, RemoteFailure, "/x answered 400: no such weights"),
        (abort_connection, PeerLost, "/x: "),
        (never_answer, DeadlineExceeded, "/x took longer than 0.2 s"),
    ],
)
async def test_failed_call_raises_a_typed_error_with_its_url(
    answer: Answering, kind: type[MeshError], expected_text: str
) -> None:
    async with serve(answer) as served:
        with pytest.raises(kind, match=expected_text) as error:
            await served.call("/x", 0.2 if answer is never_answer else scaled(SOON_S))
        assert error.value.where == served.url and "sglang.log" in error.value.fix


async def test_stopped_server_is_a_lost_peer() -> None:
    async with serve(echo) as served:
        pass
    http = HttpClient(served.url, SLOTS)
    assert "/ready: ConnectError" in await http.probe("/ready", scaled(SOON_S))
    event_queue: asyncio.Queue[Any] = asyncio.Queue()
    http.stream("/generate", {}, event_queue.put_nowait)
    async with asyncio.timeout(scaled(SOON_S)):
        assert isinstance(await event_queue.get(), OSError)
    await http.close()


async def test_proxy_of_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with serve(echo) as served:
        assert (await served.call("/pause"))["path"] == "/pause"
    async with serve(stream_parts([b'data: {"n": 1}\n\n'])) as served:
        assert await collect_events(served) == [{"n": 1}, None]


async def test_sequential_calls_share_a_connection() -> None:
    async with serve(echo) as served:
        for _ in range(3):
            await served.call("/pause")
        assert len(served.peers) == 3 and len(set(served.peers)) == 1


def test_server_keepalive_outlasts_the_clients() -> None:
    assert float(v0_5.ENVIRONMENT["SGLANG_TIMEOUT_KEEP_ALIVE"]) > 2 * KEEPALIVE_S


async def test_busy_streams_do_not_delay_a_call() -> None:
    """Check also that aborts of all slots, which a stalled server may not answer, block no call."""
    is_over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path in ("/generate", "/abort"):
            await is_over.wait()
        return web.json_response({})

    async with serve(answer) as served:
        for _ in range(3 * SLOTS):
            served.http.stream("/generate", {}, lambda event: None)
        aborts = [
            served.http.start_call("POST", "/abort", {}, deadline_s=scaled(SOON_S))
            for _ in range(SLOTS + EXTRA_CONNECTIONS - 1)
        ]
        async with asyncio.timeout(scaled(SOON_S)):
            while len(served.peers) < 2 * SLOTS + len(aborts):
                await asyncio.sleep(0.01)
        assert await served.call("/pause", scaled(1.0)) == {}
        is_over.set()


def stream_parts(
    parts: list[bytes], *, then: Callable[[web.Request], None] | None = None
) -> Answering:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.01)  # so that parts arrive as they were cut
        if then is not None:
            then(request)
        return response

    return answer


async def collect_events(served: LoopbackServer) -> list[Any]:
    event_queue: asyncio.Queue[Any] = asyncio.Queue()
    served.http.stream("/generate", {}, event_queue.put_nowait)
    events = []
    async with asyncio.timeout(scaled(SOON_S)):
        while isinstance(event := await event_queue.get(), dict):
            events.append(event)
    return [*events, event]


async def test_events_are_reassembled_from_parts_of_any_size() -> None:
    long = {"n": 2, "text": "x" * 200_000}
    whole = b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in ({"n": 1}, long, {"n": 3}))
    whole += b"data: [DONE]\n\n"
    for size in (7_001, 65_536, len(whole)):
        parts = [whole[i : i + size] for i in range(0, len(whole), size)]
        async with serve(stream_parts(parts)) as served:
            assert await collect_events(served) == [{"n": 1}, long, {"n": 3}, None]


async def test_broken_or_rejected_stream_ends_with_its_error() -> None:
    def cut(request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()

    async with serve(stream_parts([b'data: {"n": 1}\n\n'], then=cut)) as served:
        first, end = await collect_events(served)
        assert first == {"n": 1} and isinstance(end, Exception)
    async with serve(reject_request) as served:
        (end,) = await collect_events(served)
        assert isinstance(end, RemoteFailure) and "no such weights" in str(end)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_closed_stream_is_noticed_by_the_server(how: str) -> None:
    stream_started, stream_ended = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"n": 1}\n\n')
        stream_started.set()
        try:
            await asyncio.sleep(3600.0)
        finally:
            stream_ended.set()
        return response

    async with serve(answer) as served, asyncio.timeout(scaled(SOON_S)):
        stream = served.http.stream("/generate", {}, lambda event: None)
        await stream_started.wait()
        if how == "cancel":
            stream.cancel()
        else:
            await served.http.close()
        await stream_ended.wait()


async def test_every_request_has_the_api_key() -> None:
    async def require_key(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer 5e1f":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({})

    async with serve(require_key) as served:
        with pytest.raises(RemoteFailure, match="401"):
            await served.call("/generate")
        http = HttpClient(served.url, SLOTS, "5e1f")
        assert await http.get("/server_info", scaled(SOON_S)) == {}
        stream_end: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        http.stream("/generate", {}, stream_end.set_result)
        assert await asyncio.wait_for(stream_end, scaled(SOON_S)) is None
        await http.close()


def event(tokens: list[int], total: int, **more: Any) -> dict[str, Any]:
    meta = {
        "completion_tokens": total,
        "output_token_logprobs": [[-0.1 * t, t, None] for t in tokens],
        "weight_version": "3",
        "finish_reason": None,
        "prompt_tokens": 7,
        "cached_tokens": 5,
        **more,
    }
    return {"output_ids": tokens, "meta_info": meta}


def test_chunk_contains_only_new_tokens() -> None:
    first = parse_chunk(event([4, 5], 2), 0, True)
    assert (first.tokens, first.computed_tokens) == ([4, 5], 2)
    assert first.finish == FinishReason.RUNNING
    assert first.logprobs == first.raw_logprobs == [-0.4, -0.5]
    last = parse_chunk(event([6], 3, finish_reason={"type": "length", "length": 3}), 2, True)
    assert (last.tokens, last.finish, last.computed_tokens) == ([6], FinishReason.LENGTH, 0)


def test_abort_that_repeats_its_last_token_adds_none() -> None:
    is_over = {"type": "abort", "message": "Abort in waiting queue"}
    echo = event([4, 5], 2, finish_reason=is_over)  # all log-probabilities are repeated
    echo["output_ids"] = [5]
    for own in (True, False):
        again = parse_chunk(echo, 2, own)
        assert again.tokens == [] and again.finish == FinishReason.ABORTED
    # A slow server sends it in one piece with the token before.
    joined = event([5, 4, 5], 2, finish_reason=is_over)
    joined["output_ids"] = [5, 5]
    assert parse_chunk(joined, 1, True).tokens == [5]


def test_sampling_and_raw_logprobs_are_separate() -> None:
    both = parse_chunk(event([4, 5], 2, output_token_sampling_logprobs=[-1.0, -2.0]), 0, False)
    assert both.logprobs == [-1.0, -2.0] and both.raw_logprobs == [-0.4, -0.5]


@pytest.mark.parametrize("logprobs", [{}, {"output_token_sampling_logprobs": [-0.5]}], ids=str)
def test_missing_sampling_logprobs_raise(logprobs: dict[str, Any]) -> None:
    with pytest.raises(RemoteFailure, match="of 2 tokens"):
        parse_chunk(event([4, 5], 2, **logprobs), 0, False)


def test_error_ends_the_request_with_its_reason() -> None:
    refused = parse_chunk({"error": {"message": "too long", "code": 400}}, 0, True)
    assert refused.finish == FinishReason.ABORTED and refused.reason == "too long"


def test_tokens_of_other_versions_are_counted() -> None:
    sent = SentRequest(request(1), "r", 10, version=2)
    sent.add_chunk(StreamChunk(tokens=[1, 2, 3], logprobs=[0.0] * 3, raw_logprobs=[0.0] * 3))
    assert sent.versions == [2] * 3
    assert sent.count_other_versions([(2, 0, 3)]) == 0
    assert sent.count_other_versions([(1, 0, 2), (2, 2, 3)]) == 2


@pytest.mark.parametrize(("token_s", "expected"), [(0.0, 8), (0.2, 8), (0.004, 12), (0.0005, 32)])
def test_stream_interval_grows_with_the_rate(token_s: float, expected: int) -> None:
    assert choose_stream_interval(token_s) == expected


def test_token_rate_counts_concurrent_requests() -> None:
    rate = TokenRate()
    rate.add_time(5.0, 0)  # no request ran before
    assert rate.token_s == 0.0
    for second in range(6, 10):
        rate.add_time(float(second), 8)
        rate.add_tokens(400)
    assert rate.token_s == pytest.approx(3 * 8 / 1600)
    for second in range(10, 100):
        rate.add_time(float(second), 8)
        rate.add_tokens(4000)
    assert rate.token_s == pytest.approx(8 / 4000, rel=0.05)


def test_truncated_sampling_requests_sampling_logprobs() -> None:
    body = build_generate_body(request(1, top_p=0.9, seed=2**64 - 1), 5, "r", "w:1.0", VOCAB)
    assert body["return_sampling_mask"] and body["sampling_params"]["top_k"] == VOCAB
    assert 0 <= body["sampling_params"]["sampling_seed"] < 2**63
    for model_s_own in (request(1), request(1, temperature=0.0, top_p=0.9)):
        assert is_plain_sampling(model_s_own)
        assert "return_sampling_mask" not in build_generate_body(
            model_s_own, 5, "r", "w:1.0", VOCAB
        )


def test_logit_bias_is_sent_and_leaves_the_sampling_plain() -> None:
    biased = request(1, adjustments=LogitAdjustments(((3, -2.0), (7, 1.5))))
    check_sampling(biased, 150_000, uses_seeds=False)
    body = build_generate_body(biased, 5, "r", "w:1.0", VOCAB)
    assert body["sampling_params"]["logit_bias"] == {"3": -2.0, "7": 1.5}
    assert is_plain_sampling(biased)  # SGLang's log-probabilities include the bias


@pytest.mark.parametrize(
    "how",
    [
        {"adjustments": LogitAdjustments(repetition_penalty=1.1)},
        {"adjustments": LogitAdjustments(presence_penalty=0.1)},
        {"adjustments": LogitAdjustments(((3, 1.0),), min_tokens=2)},
        {"adjustments": LogitAdjustments(((3, 1.0),)), "wants_raw_logprobs": True},
    ],
    ids=str,
)
def test_adjustments_that_sglang_applies_otherwise_are_rejected(how: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="SGLang applies differently"):
        check_sampling(request(1, **how), VOCAB, uses_seeds=False)


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@given(given_=tokens, turn=tokens, sizes=st.lists(st.integers(1, 5), min_size=12), data=st.data())
def test_stop_text_ends_at_the_same_token_for_any_batching(
    given_: list[int], turn: list[int], sizes: list[int], data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(given_)))
    whole = text_of([*given_[begin:], *turn])
    start = data.draw(st.integers(0, len(whole)))
    text = whole[start : start + data.draw(st.integers(1, 5))] or "nowhere"
    assume(text not in text_of(given_[begin:]))  # it would have ended earlier
    sent = SentRequest(request(1, [*given_, 0], stop_strings=(text,), turn_start=begin), "r", 99)
    sent.request.tokens = sent.request.tokens[:-1]
    arrived, is_over = 0, False
    for size in sizes:
        part = turn[arrived : arrived + size]
        if is_over or not part:
            break
        arrived += len(part)
        none = [0.0] * len(part)
        sent.add_chunk(StreamChunk(tokens=part, logprobs=none, raw_logprobs=none))
        is_over = sent.cut_at_stop_string(text_of, len(part))
    ends = [n for n in range(1, len(turn) + 1) if text in text_of([*given_[begin:], *turn[:n]])]
    assert sent.tokens == turn[: ends[0] if ends else len(turn)]
    assert is_over == bool(ends)
    assert len(sent.tokens) == len(sent.logprobs) == len(sent.versions)
