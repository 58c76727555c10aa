"""Sleep of an SGLang server: its memory is released by tags, or by ending its process."""

from __future__ import annotations

import asyncio
from typing import Protocol

from meshrl.common.base.errors import Refused, StillStarting
from meshrl.common.base.files.offloaded_tensors import PIECE_BYTES, Octets
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.http_client import HttpClient, PendingResult

RELEASE_TIMEOUT_S = 20.0
RESTART_POLL_S = 15.0  # a caller waits this long for a restart, and then asks again


class ServerMemory(Protocol):
    """Memory of a server without requests."""

    forgets_state: bool  # after `resume` the server is as at its first start

    def release(self) -> None: ...

    def release_tag(self, tag: str) -> None:
        """Release a part of the memory; its content is lost."""

    def resume_tag(self, tag: str) -> None:
        """Restore a released part, without its content."""

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
        self._http, self._tags = http, tags
        self._released_tags: set[str] = set()

    def release(self) -> None:
        self._release([tag for tag in self._tags if tag not in self._released_tags])

    def release_tag(self, tag: str) -> None:
        if tag not in self._released_tags:
            self._release([tag])

    def _release(self, tags: list[str]) -> None:
        # Set before the call: if the answer is lost, the memory may be released all the same.
        self._released_tags.update(tags)
        if tags:
            self._http.call("POST", v0_5.RELEASE, {"tags": tags}, deadline_s=RELEASE_TIMEOUT_S)

    def begin_resume(self) -> None:
        """Do nothing, because `resume` takes milliseconds."""

    def resume(self) -> None:
        self._resume([tag for tag in self._tags if tag in self._released_tags])

    def resume_tag(self, tag: str) -> None:
        if tag in self._released_tags:
            self._resume([tag])

    def _resume(self, tags: list[str]) -> None:
        # SGLang crashes if it restores tags twice, and it restores them even if its answer is lost.
        self._released_tags.difference_update(tags)
        if tags:
            self._http.call("POST", v0_5.RESUME, {"tags": tags}, deadline_s=RELEASE_TIMEOUT_S)

    def cancel_resume(self) -> None:
        """Do nothing, because nothing is restored before `resume`."""


class TagControl(Protocol):
    """Control of a paused server that releases its memory by tag."""

    def release_tag(self, tag: str) -> None: ...
    def resume_tag(self, tag: str) -> None: ...


class TagMemory:
    """Memory of one tag of a server, whose content is lost when it is released."""

    piece_bytes = PIECE_BYTES

    def __init__(self, control: TagControl, tag: str, size_bytes: int) -> None:
        self._control, self._tag = control, tag
        self.sizes_bytes: dict[str, int] = {}  # nothing is copied
        self.total_bytes = max(1, size_bytes)  # the server reports small sizes as 0

    def read_into(self, name: str, start: int, out: Octets) -> None:
        raise KeyError(name)

    def write(self, name: str, start: int, piece: Octets) -> None:
        raise KeyError(name)

    def release(self) -> None:
        self._control.release_tag(self._tag)

    def reallocate(self) -> None:
        self._control.resume_tag(self._tag)

    def refresh(self) -> None:
        """Do nothing, because no content was copied."""


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

    def release_tag(self, tag: str) -> None:
        raise Refused(f"SGLang cannot release {tag} alone", where=self._server.http.url)

    resume_tag = release_tag

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
