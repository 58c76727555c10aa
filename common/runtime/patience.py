"""Repeats a call while the process that it needs is away, since that process will be restarted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.clock import Clock
from common.errors import MeshError

T = TypeVar("T")


class NotThere(MeshError):
    """A service that should exist has no live lease at the moment."""

    code = "not_there"
    retryable = True


async def patiently(
    clock: Clock, action: Callable[[], Awaitable[T]], *, every_s: float = 0.5, for_s: float = 3600.0
) -> T:
    """The result of `action()`, which is repeated every `every_s` seconds while it fails with a
    retryable error, for at most `for_s`; other errors go through.
    """
    deadline = clock.monotonic() + for_s
    while True:
        try:
            return await action()
        except MeshError as error:
            if not error.retryable or clock.monotonic() > deadline:
                raise
        await clock.sleep(every_s)
