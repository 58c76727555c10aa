"""One piece of arithmetic at a time; those of steps can be held back while others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Pieces:
    """`async with pieces.any():` waits for what runs; `pieces.step()` also while they are held."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._go_on = asyncio.Event()
        self._go_on.set()

    @asynccontextmanager
    async def any(self) -> AsyncIterator[None]:
        """A piece that copies what is there, or replaces it."""
        async with self._one:
            yield

    @asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """A piece of a step."""
        while True:
            await self._go_on.wait()
            async with self._one:
                if self._go_on.is_set():
                    yield
                    return

    async def hold(self) -> None:
        """No piece of a step begins until `let_go`, and none runs any more."""
        self._go_on.clear()
        async with self._one:
            return

    def let_go(self) -> None:
        """Steps go on."""
        self._go_on.set()

    async def stop(self) -> None:
        """Nothing runs from now on until `go_on`."""
        await self._one.acquire()

    def go_on(self) -> None:
        """The next piece begins."""
        self._one.release()
