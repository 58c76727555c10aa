"""HTTP client of one server: calls with deadlines, and token streams, on this process's loop.

The engine's thread sends requests and waits. The loop only moves bytes and decodes JSON, so that a
stream is read at once however long a step of the engine takes.

Calls go through httpx, streams through aiohttp, which parses in C. With 64 streams of 500 events at
50 events/s each, an event costs 38 us of CPU with aiohttp and 96 us with httpx, both under uvloop.
At 10,000 tokens/s, httpx would fill the loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import aiohttp
import httpx

from meshrl.common.base.errors import DeadlineExceeded, PeerLost, RemoteFailure

CONNECT_TIMEOUT_S = 10.0  # to a server on this host
CLOSE_TIMEOUT_S = 5.0
GRACE_S = 2.0  # for an answer to cross threads after the call's own deadline
# Idle time after which a connection is not used again. The server's limit is longer
# (`v0_5.ENVIRONMENT`). If the server closed a connection while a call is sent on it, the outcome of
# the call would be unknown.
KEEPALIVE_S = 15.0
EXTRA_CONNECTIONS = 8  # concurrent calls beside the aborts of all slots: pauses, weights, probes
MAX_REASON_CHARS = 2000  # characters of a response body in an error
LOG_HINT = "Read its log, sglang.log"
UNAUTHORIZED = "answered 401"  # in the error of a server that requires another key

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

ServerEvent = dict[str, Any]
OnEvent = Callable[[ServerEvent | Exception | None], None]


class PendingResult(Protocol[R_co]):
    """Result that a thread other than the loop's waits for."""

    def result(self, timeout: float | None = None) -> R_co: ...

    def cancel(self) -> bool: ...

    def cancelled(self) -> bool: ...

    def done(self) -> bool: ...


class HttpClient:
    """Client of one server, created on the loop that talks to it.

    `get` and `probe` are awaited on that loop; the other methods serve other threads. Close the
    client at the end of the loop.
    """

    def __init__(self, url: str, slots: int, key: str = "") -> None:
        """Open the client.

        `slots`: concurrent streams of the server. `key`: API key that the server requires.
        """
        self.url = url
        known = {"Authorization": f"Bearer {key}"} if key else {}
        self._loop = asyncio.get_running_loop()
        # Loopback: neither client reads a proxy from the environment. The limit is twice the slots,
        # because a finished stream may still be closing when the next opens.
        self._stream_session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=2 * slots, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            headers=known,
        )
        most = slots + EXTRA_CONNECTIONS
        self._call_client = httpx.AsyncClient(
            base_url=url,
            limits=httpx.Limits(max_connections=most, keepalive_expiry=KEEPALIVE_S),
            timeout=None,  # each call has one deadline for all its steps
            trust_env=False,
            headers=known,
        )
        self._lifetime_task = self._loop.create_task(self._run_until_closed())

    async def _run_until_closed(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await self._stream_session.close()
            await self._call_client.aclose()

    async def close(self) -> None:
        """Close all open connections."""
        self._lifetime_task.cancel()
        await asyncio.wait([self._lifetime_task], timeout=CLOSE_TIMEOUT_S)

    async def get(self, path: str, deadline_s: float) -> Any:
        return await self._request("GET", path, None, deadline_s)

    async def probe(self, path: str, deadline_s: float) -> str:
        """Return the reason why a GET fails, or an empty text."""
        try:
            await self.get(path, deadline_s)
        except (DeadlineExceeded, PeerLost, RemoteFailure) as error:
            return str(error)
        return ""

    # -- from other threads ----------------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, R]) -> PendingResult[R]:
        """Run `coroutine` on the loop until it ends or the returned future is cancelled."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, method: str, path: str, body: Any = None, *, deadline_s: float) -> Any:
        """Return the decoded answer of a call.

        Raise RemoteFailure if the server rejects it, PeerLost if the server is gone,
        DeadlineExceeded if the outcome is unknown.
        """
        return self.wait_for(
            self.start_call(method, path, body, deadline_s=deadline_s), path, deadline_s
        )

    def start_call(
        self, method: str, path: str, body: Any = None, *, deadline_s: float
    ) -> PendingResult[Any]:
        """Start a call without waiting for it, so that the caller can do other work."""
        return self.spawn(self._request(method, path, body, deadline_s))

    def wait_for(self, answer: PendingResult[R], path: str, deadline_s: float) -> R:
        try:
            return answer.result(deadline_s + GRACE_S)
        except TimeoutError:
            answer.cancel()
            raise self._make_timeout_error(path, deadline_s) from None

    def stream(self, path: str, body: dict[str, Any], on_event: OnEvent) -> PendingResult[None]:
        """Stream server-sent events until the server ends them; cancel the returned future to hang
        up.

        `on_event` is called on the loop with each event, and at the end with the error or None.

        There is no deadline between two events, because a request may wait as long as the server is
        paused. A dead server ends the connection; the health check detects one that hangs.
        """
        return self.spawn(self._read_stream(path, body, on_event))

    # -- on the loop -----------------------------------------------------------------------------

    async def _request(self, method: str, path: str, body: Any, deadline_s: float) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._call_client.request(method, path, json=body)
        except TimeoutError:
            raise self._make_timeout_error(path, deadline_s) from None
        except httpx.HTTPError as error:
            raise PeerLost(f"{path}: {error!r}", where=self.url, fix=LOG_HINT) from error
        if response.is_error:
            raise self._make_rejection_error(path, response.status_code, response.content)
        try:
            return response.json() if response.content.strip() else None
        except ValueError:
            message = f"{path} did not answer with JSON: {response.text[:MAX_REASON_CHARS]}"
            raise RemoteFailure(message, where=self.url, fix=LOG_HINT) from None

    def _make_timeout_error(self, path: str, deadline_s: float) -> DeadlineExceeded:
        message = f"{path} took longer than {deadline_s:g} s"
        return DeadlineExceeded(message, where=self.url, fix=LOG_HINT)

    def _make_rejection_error(self, path: str, status: int, content: bytes) -> RemoteFailure:
        reason = content.decode(errors="replace")[:MAX_REASON_CHARS]
        return RemoteFailure(f"{path} answered {status}: {reason}", where=self.url, fix=LOG_HINT)

    async def _read_stream(self, path: str, body: dict[str, Any], on_event: OnEvent) -> None:
        try:
            async with self._stream_session.post(self.url + path, json=body) as response:
                if response.status >= 400:
                    raise self._make_rejection_error(path, response.status, await response.read())
                buffer = bytearray()
                async for part in response.content.iter_any():
                    buffer += part
                    for event in _split_events(buffer):
                        on_event(event)
        except (aiohttp.ClientError, OSError, RemoteFailure, ValueError) as error:
            on_event(error)
        else:
            on_event(None)


def _split_events(buffer: bytearray) -> Iterator[ServerEvent]:
    """Cut complete events off the buffer.

    Lines may be long, so the limit of a line reader does not apply.
    """
    while (end := buffer.find(b"\n\n")) >= 0:
        line = bytes(buffer[:end]).removeprefix(b"data:").strip()
        del buffer[: end + 2]
        if line and line != b"[DONE]":
            yield json.loads(line)
