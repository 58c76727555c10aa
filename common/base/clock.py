"""Clocks: actors read the time and sleep through `Clock`, so that a mesh can run under virtual
time.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from meshrl.common.base.errors import DeadlineExceeded


class Clock(Protocol):
    """Clocks of a process, provided by the machine or a simulation."""

    def monotonic(self) -> float:
        """Return seconds that never go back; only differences are meaningful. Safe from any
        thread.
        """

    def wall(self) -> float:
        """Return seconds since the epoch."""

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`; 0 lets other tasks run first."""

    def timeout(self, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
        """End the block after `seconds` with DeadlineExceeded(what)."""


class LoopTimeout(AbstractAsyncContextManager[None]):
    """Timeout by the time of the running loop, which may be virtual.

    It is a class and no generator, because every await of the mesh is inside a timeout.
    """

    __slots__ = ("_scope", "_seconds", "_what")

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds, self._what = seconds, what
        self._scope = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)  # type: ignore[arg-type]
        except TimeoutError:
            raise self._make_deadline_error() from None
        if isinstance(error, TimeoutError) and self._scope.expired():
            raise self._make_deadline_error() from None

    def _make_deadline_error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._what} took longer than {self._seconds:g} s")


class SystemClock:
    """Clocks of the machine."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary point, which never go back."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
        """End the block after `seconds` with DeadlineExceeded(what)."""
        return LoopTimeout(seconds, what)
