"""Coroutines across two jails: one runs to its end where it is, while the other side waits."""

from __future__ import annotations

import types
from typing import Any, Callable, Optional

_LOOPS: list[Any] = []  # the one of this process, which objects of asyncio may belong to


def awaited(place: Any) -> Any:
    """A coroutine of ours that stands for one of the other side."""

    async def coroutine() -> Any:
        return place.ask("await")

    return coroutine()


@types.coroutine
def _at_once(target: Any, waits: Callable[[], None]) -> Any:
    """An awaitable that comes to its end without a wait; else `waits`, which raises."""
    steps = target.__await__()
    try:
        steps.send(None) if hasattr(steps, "send") else next(steps)
    except StopIteration as end:
        return end.value
    waits()
    yield


def run(target: Any, waits: Optional[Callable[[], None]] = None) -> Any:
    """Runs an awaitable of this side to its end; see `_at_once`."""
    import asyncio

    async def waited() -> Any:
        return await (target if waits is None else _at_once(target, waits))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not _LOOPS:
            _LOOPS.append(asyncio.new_event_loop())
            asyncio.set_event_loop(_LOOPS[0])
        return _LOOPS[0].run_until_complete(waited())
    return _beside(waited())


def _beside(coroutine: Any) -> Any:
    """While a loop of this thread waits for it."""
    import asyncio
    import threading

    found: list[Any] = []

    def work() -> None:
        try:
            found.append((True, asyncio.run(coroutine)))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    fine, value = found[0]
    if not fine:
        raise value
    return value


def next_of(target: Any) -> Any:
    """The next value of an asynchronous iterator."""
    return run(type(target).__anext__(target))


def entered(target: Any) -> Any:
    return run(type(target).__aenter__(target))


def left(target: Any, *error: Any) -> Any:
    return run(type(target).__aexit__(target, *error))
