"""Sleep of an SGLang server: its memory is released by tags, or by ending its process."""

from __future__ import annotations

import asyncio
from typing import Protocol

from meshrl.common.base.errors import StillStarting
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.http_client import HttpClient, PendingResult

RELEASE_TIMEOUT_S = 20.0
RESTART_POLL_S = 15.0  # a caller waits this long for a restart, and then asks again


class ServerMemory(Protocol):
    """Memory of a server without requests."""

    forgets_state: bool  # after `resume` the server is as at its first start

    def release(self) -> None: ...

    def begin_resume(self) -> None:
        """Begin what takes long, without waiting for it."""

    def resume(self) -> None:
        """Return once the memory is there; raise StillStarting while that takes longer."""

    def cancel_resume(self) -> None:
        """Release what `begin_resume` has begun to restore."""


class TaggedMemory:
    """Memory that SGLang releases and restores by tags."""

    forgets_state = False

    def __init__(self, http: HttpClient, tags: tuple[str, ...]) -> None:
        self._http, self._body = http, {"tags": list(tags)}

    def release(self) -> None:
        self._http.call("POST", v0_5.RELEASE, self._body, deadline_s=RELEASE_TIMEOUT_S)

    def begin_resume(self) -> None:
        """Do nothing, because `resume` takes milliseconds."""

    def resume(self) -> None:
        self._http.call("POST", v0_5.RESUME, self._body, deadline_s=RELEASE_TIMEOUT_S)

    def cancel_resume(self) -> None:
        """Do nothing, because nothing is restored before `resume`."""


class RestartableServer(Protocol):
    """Server process that can be ended and launched again under its address."""

    @property
    def http(self) -> HttpClient: ...

    @property
    def start_text(self) -> str: ...

    async def end(self) -> None: ...

    async def launch(self) -> None: ...


class RestartedMemory:
    """Memory of a server that cannot release it unharmed: its process ends for the sleep."""

    forgets_state = True

    def __init__(self, server: RestartableServer) -> None:
        self._server = server
        self._launch: PendingResult[None] | None = None
        self._launch_task: asyncio.Task[None] | None = None  # the same, on the loop

    def release(self) -> None:
        http, self._launch = self._server.http, None
        http.wait_for(http.spawn(self._end()), "the end of SGLang", RELEASE_TIMEOUT_S)

    def cancel_resume(self) -> None:
        self.release()

    async def _end(self) -> None:
        """End the process; a launch that still runs has cleaned up by then."""
        if self._launch_task is not None:
            self._launch_task.cancel()
            await asyncio.wait([self._launch_task])
        await self._server.end()

    async def _start(self) -> None:
        self._launch_task = asyncio.current_task()
        await self._server.launch()

    def begin_resume(self) -> None:
        if self._launch is None:
            self._launch = self._server.http.spawn(self._start())

    def resume(self) -> None:
        self.begin_resume()
        launch, where = self._launch, self._server.http.url
        assert launch is not None
        try:
            launch.result(RESTART_POLL_S)
        except TimeoutError:
            raise StillStarting(
                f"SGLang restarts after a sleep: {self._server.start_text}", where=where
            ) from None
        finally:
            if launch.done():
                self._launch = None
