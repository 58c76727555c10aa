"""Calls and streams of the adapter's HTTP, against a small server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from meshrl.common.base.errors import DeadlineExceeded, MeshError, PeerLost, RemoteFailure
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.http import BESIDE, IDLE_S, Http
from tests.load import scaled

SLOTS = 2
SOON_S = 5.0

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Served:
    """A server whose every path is answered by one function, and a client of it."""

    def __init__(self, url: str, http: Http, peers: list[Any]) -> None:
        self.url, self.http = url, http
        self.peers = peers  # the address of the connection of each request

    def call(self, path: str, deadline_s: float = 0.0) -> Awaitable[Any]:
        """As the engine's thread asks."""
        deadline_s = deadline_s or scaled(SOON_S)
        return asyncio.to_thread(self.http.call, "POST", path, {}, deadline_s=deadline_s)


@asynccontextmanager
async def serving(answer: Answering) -> AsyncIterator[Served]:
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
    served = Served(url, Http(url, SLOTS), peers)
    try:
        yield served
    finally:
        await served.http.close()
        await runner.cleanup()


async def echo(request: web.Request) -> web.Response:
    return web.json_response({"path": request.path, "body": await request.json()})


async def refusing(request: web.Request) -> web.Response:
    return web.Response(status=400, text="no such weights")


async def hanging(request: web.Request) -> web.Response:
    await asyncio.sleep(3600.0)
    return web.Response()


async def hanging_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_an_answer_is_decoded_and_an_empty_one_is_none() -> None:
    async with serving(echo) as served:
        assert await served.call("/pause") == {"path": "/pause", "body": {}}

    async def nothing(request: web.Request) -> web.Response:
        return web.Response()

    async with serving(nothing) as served:
        assert await served.call("/abort") is None


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (refusing, RemoteFailure, "/x answered 400: no such weights"),
        (hanging_up, PeerLost, "/x: "),
        (hanging, DeadlineExceeded, "/x took longer than 0.2 s"),
    ],
)
async def test_what_went_wrong_has_a_type_and_says_where(
    answer: Answering, kind: type[MeshError], said: str
) -> None:
    async with serving(answer) as served:
        with pytest.raises(kind, match=said) as error:
            await served.call("/x", 0.2 if answer is hanging else scaled(SOON_S))
        assert error.value.where == served.url and "sglang.log" in error.value.fix


async def test_a_server_that_has_gone_is_a_lost_peer() -> None:
    async with serving(echo) as served:
        pass
    http = Http(served.url, SLOTS)
    assert "/ready: ConnectError" in await http.probe("/ready", scaled(SOON_S))
    heard: asyncio.Queue[Any] = asyncio.Queue()
    http.stream("/generate", {}, heard.put_nowait)
    async with asyncio.timeout(scaled(SOON_S)):
        assert isinstance(await heard.get(), OSError)
    await http.close()


async def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with serving(echo) as served:
        assert (await served.call("/pause"))["path"] == "/pause"
    async with serving(streaming([b'data: {"n": 1}\n\n'])) as served:
        assert await all_of(served) == [{"n": 1}, None]


async def test_calls_one_after_the_other_share_a_connection() -> None:
    async with serving(echo) as served:
        for _ in range(3):
            await served.call("/pause")
        assert len(served.peers) == 3 and len(set(served.peers)) == 1


def test_the_server_keeps_a_connection_for_longer_than_it_is_used_again() -> None:
    assert float(v0_5.ENVIRONMENT["SGLANG_TIMEOUT_KEEP_ALIVE"]) > 2 * IDLE_S


async def test_streams_that_are_all_at_work_do_not_keep_a_call_waiting() -> None:
    """Nor do the aborts of all slots, which a server that stands may not answer."""
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path in ("/generate", "/abort"):
            await over.wait()
        return web.json_response({})

    async with serving(answer) as served:
        for _ in range(3 * SLOTS):
            served.http.stream("/generate", {}, lambda event: None)
        aborts = [
            served.http.begin("POST", "/abort", {}, deadline_s=scaled(SOON_S))
            for _ in range(SLOTS + BESIDE - 1)
        ]
        async with asyncio.timeout(scaled(SOON_S)):
            while len(served.peers) < 2 * SLOTS + len(aborts):
                await asyncio.sleep(0.01)
        assert await served.call("/pause", scaled(1.0)) == {}
        over.set()


def streaming(
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


async def all_of(served: Served) -> list[Any]:
    heard: asyncio.Queue[Any] = asyncio.Queue()
    served.http.stream("/generate", {}, heard.put_nowait)
    events = []
    async with asyncio.timeout(scaled(SOON_S)):
        while isinstance(event := await heard.get(), dict):
            events.append(event)
    return [*events, event]


async def test_events_come_whole_however_they_are_cut() -> None:
    long = {"n": 2, "text": "x" * 200_000}
    whole = b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in ({"n": 1}, long, {"n": 3}))
    whole += b"data: [DONE]\n\n"
    for size in (7_001, 65_536, len(whole)):
        parts = [whole[i : i + size] for i in range(0, len(whole), size)]
        async with serving(streaming(parts)) as served:
            assert await all_of(served) == [{"n": 1}, long, {"n": 3}, None]


async def test_a_stream_that_breaks_or_is_refused_ends_with_the_reason() -> None:
    def cut(request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()

    async with serving(streaming([b'data: {"n": 1}\n\n'], then=cut)) as served:
        first, end = await all_of(served)
        assert first == {"n": 1} and isinstance(end, Exception)
    async with serving(refusing) as served:
        (end,) = await all_of(served)
        assert isinstance(end, RemoteFailure) and "no such weights" in str(end)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_hanging_up_is_noticed_by_the_server(how: str) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"n": 1}\n\n')
        begun.set()
        try:
            await asyncio.sleep(3600.0)
        finally:
            gone.set()
        return response

    async with serving(answer) as served, asyncio.timeout(scaled(SOON_S)):
        stream = served.http.stream("/generate", {}, lambda event: None)
        await begun.wait()
        if how == "cancel":
            stream.cancel()
        else:
            await served.http.close()
        await gone.wait()


async def test_every_request_has_the_key_that_the_server_wants() -> None:
    async def guarded(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer 5e1f":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({})

    async with serving(guarded) as served:
        with pytest.raises(RemoteFailure, match="401"):
            await served.call("/generate")
        http = Http(served.url, SLOTS, "5e1f")
        assert await http.get("/server_info", scaled(SOON_S)) == {}
        ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        http.stream("/generate", {}, ended.set_result)
        assert await asyncio.wait_for(ended, scaled(SOON_S)) is None
        await http.close()
