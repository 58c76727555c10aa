"""Clocks: actors read the time and sleep through `Clock`, so that a mesh can run under virtual
time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from common.errors import DeadlineExceeded


class Clock(Protocol):
    """The clocks of a process, as the machine or a simulation gives them."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something. Safe from any thread."""

    def wall(self) -> float:
        """Seconds since the epoch."""

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds`; 0 lets other tasks run first."""

    def timeout(self, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
        """Ends its block after `seconds` with DeadlineExceeded(what)."""


@asynccontextmanager
async def loop_timeout(seconds: float, what: str) -> AsyncIterator[None]:
    """A timeout by the time of the running loop, which may be virtual."""
    try:
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError as error:
        if scope.expired():
            raise DeadlineExceeded(f"{what} took longer than {seconds:g} s") from None
        raise error


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary point, which never go back."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds`."""
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
        """Ends its block after `seconds` with DeadlineExceeded(what)."""
        return loop_timeout(seconds, what)
