"""Checks that a server answers: three failures in a row, with grace while it is kept busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.base.errors import MeshError, PeerLost
from services.engine.sglang import v0_5
from services.engine.sglang.http import Http

LOOK_S = 10.0
ANSWER_S = 25.0  # the server itself gives up after 20
STRIKES = 3


class HealthWatch:
    """`failure` is asked by the engine's thread, which is told by what it raises; looks run on the
    loop that talks to the server. While tokens come there is nothing to ask.

    `stands`: the server is paused. It would not generate for a health check then, and is asked for
    something that its scheduler answers in a pause too.
    """

    def __init__(
        self,
        http: Http,
        lost: Callable[[], MeshError | None],
        look_s: float = LOOK_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`lost` is asked for the error of a server that has ended."""
        self._http, self._lost = http, lost
        self._look_s, self._answer_s = look_s, answer_s
        self.stands = False
        self._strikes = 0
        self._heard = False
        self._graces = 0
        self._ended: MeshError | None = None
        self._looks = http.spawn(self._go_on_looking())

    def alive(self) -> None:
        """It has said something."""
        self._heard = True

    @contextmanager
    def grace(self) -> Iterator[None]:
        """No look counts that began before this or falls into it."""
        self._graces += 1
        try:
            yield
        finally:
            self._graces += 1
            self._heard = True

    def failure(self) -> MeshError | None:
        if self._ended is None:
            self._ended = self._lost()
        return self._ended

    async def _go_on_looking(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            await self._look()

    async def _look(self) -> None:
        graces = self._graces
        if self._heard or graces % 2:
            self._heard = False
            self._strikes = 0
            return
        asked = v0_5.INFO if self.stands else v0_5.HEALTH
        reason = await self._http.probe(asked, self._answer_s)
        if not reason or self._heard or self._graces != graces:
            self._strikes = 0
            return
        self._strikes += 1
        if self._strikes >= STRIKES:
            self._ended = PeerLost(
                f"SGLang failed {STRIKES} health checks in a row: {reason}", where=self._http.url
            )

    def close(self) -> None:
        self._looks.cancel()
