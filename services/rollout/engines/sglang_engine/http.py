"""One server over HTTP: calls with deadlines, and token streams, on a loop in a thread of its own.

The engine's thread asks and waits; the loop's thread only moves bytes and decodes JSON, so that a
stream is read at once however long a step of the engine takes.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, TypeVar

import aiohttp

from common.errors import DeadlineExceeded, PeerLost, RemoteFailure

CONNECT_S = 10.0  # to a server on this host
CLOSE_S = 5.0
GRACE_S = 2.0  # for an answer to cross threads after its own deadline has struck
REASON = 2000  # characters of an error's body that are shown

R = TypeVar("R")
Answer = Future  # of this thread, awaited on another

OnChunk = Callable[[dict[str, Any]], None]
OnEnd = Callable[[Exception | None], None]


class Http:
    """Calls from any thread but its own; `on_chunk` and `on_end` run on its thread."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None
        self._thread = threading.Thread(target=self._run, name="sglang-http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, method: str, path: str, body: Any = None, *, deadline_s: float) -> Any:
        """The decoded answer. RemoteFailure when the server refuses, PeerLost when it has gone,
        DeadlineExceeded when whether it acted is unknown."""
        return self.result(self.begin(method, path, body, deadline_s=deadline_s), path, deadline_s)

    def begin(self, method: str, path: str, body: Any = None, *, deadline_s: float) -> Answer[Any]:
        """The same without waiting: what is done meanwhile, another thread of the server awaits."""
        answer = self._answer(method, path, body, deadline_s)
        return asyncio.run_coroutine_threadsafe(answer, self._loop)

    def result(self, future: Answer[Any], path: str, deadline_s: float) -> Any:
        try:
            return future.result(deadline_s + GRACE_S)
        except NoAnswer:
            future.cancel()
            raise DeadlineExceeded(
                f"{path} took longer than {deadline_s:g} s", where=self.url
            ) from None

    async def _answer(self, method: str, path: str, body: Any, deadline_s: float) -> Any:
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._open().request(method, self.url + path, json=body) as response,
            ):
                content = await response.read()
        except TimeoutError:
            message = f"{path} took longer than {deadline_s:g} s"
            raise DeadlineExceeded(message, where=self.url) from None
        except (aiohttp.ClientError, OSError) as error:
            raise PeerLost(f"{path}: {error!r}", where=self.url) from error
        if response.status >= 400:
            reason = content.decode(errors="replace")[:REASON]
            raise RemoteFailure(f"{path} answered {response.status}: {reason}", where=self.url)
        try:
            return json.loads(content) if content.strip() else None
        except ValueError:
            shown = content.decode(errors="replace")[:REASON]
            raise RemoteFailure(f"{path} answered no JSON: {shown}", where=self.url) from None

    def stream(
        self, path: str, body: dict[str, Any], on_chunk: OnChunk, on_end: OnEnd
    ) -> Answer[None]:
        """Server-sent events until the server ends them; cancelling the result hangs up.

        There is no deadline between two events, since a request may wait for as long as the server
        is paused: a server that has died ends the connection, and one that hangs is found by the
        watch over its health.
        """
        return asyncio.run_coroutine_threadsafe(
            self._stream(path, body, on_chunk, on_end), self._loop
        )

    async def _stream(
        self, path: str, body: dict[str, Any], on_chunk: OnChunk, on_end: OnEnd
    ) -> None:
        try:
            async with self._open().post(self.url + path, json=body) as response:
                if response.status >= 400:
                    reason = (await response.read()).decode(errors="replace")[:REASON]
                    raise RemoteFailure(f"{path} answered {response.status}: {reason}")
                buffer = bytearray()
                async for part in response.content.iter_any():
                    buffer += part
                    for event in _events(buffer):
                        on_chunk(event)
        except (aiohttp.ClientError, OSError, RemoteFailure, ValueError) as error:
            on_end(error)
        else:
            on_end(None)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # A connection for each request: one that is kept may be closed by the server just
                # as a call goes out on it, and whether the call was heard is unknown then.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._session

    def every(self, interval_s: float, look: Callable[[], Any]) -> Answer[None]:
        """Awaits `look()` on the loop each `interval_s`, until the result is cancelled."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(interval_s)
                await look()

        return asyncio.run_coroutine_threadsafe(repeat(), self._loop)

    async def off_thread(self, answer: Coroutine[Any, Any, R], deadline_s: float) -> R:
        """Awaits on the caller's loop what runs on this one."""
        future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        async with asyncio.timeout(deadline_s + GRACE_S):
            return await asyncio.wrap_future(future)

    async def get(self, path: str, deadline_s: float) -> Any:
        return await self._answer("GET", path, None, deadline_s)

    async def probe(self, path: str, deadline_s: float) -> str:
        """Why a GET fails, or nothing."""
        try:
            await self.get(path, deadline_s)
        except (DeadlineExceeded, PeerLost, RemoteFailure) as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Hangs up on everything that is open; the thread ends."""
        if not self._thread.is_alive():
            return
        future = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            future.result(CLOSE_S)
        except NoAnswer:
            future.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._loop.is_running():
            self._loop.close()

    async def _close(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def _events(buffer: bytearray) -> list[dict[str, Any]]:
    """Cuts whole events off the buffer. Lines may be long: no limit of a line reader applies."""
    events = []
    while (end := buffer.find(b"\n\n")) >= 0:
        line = bytes(buffer[:end]).removeprefix(b"data:").strip()
        del buffer[: end + 2]
        if line and line != b"[DONE]":
            events.append(json.loads(line))
    return events
