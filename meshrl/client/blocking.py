"""A client for code that waits for its answer, as commands do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from meshrl.client.client import Client

T = TypeVar("T")


def request(
    question: Callable[[Client], Awaitable[T]], mesh: Path | None = None, token: str | None = None
) -> T:
    """Return what a mesh answers: the one that is named, or else that of the token."""

    async def answered() -> T:
        async with Client(mesh, None if mesh else token) as client:
            return await question(client)

    return asyncio.run(answered())
