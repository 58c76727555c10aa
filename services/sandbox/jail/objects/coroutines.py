"""Coroutines across two jails: one side runs a coroutine to its end while the other waits."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, Callable, Optional

if TYPE_CHECKING:
    from .proxies import RemoteRef

_LOOPS: list[Any] = []  # the one of this process, which objects of asyncio may belong to


def make_remote_coroutine(ref: RemoteRef) -> Any:
    async def coroutine() -> Any:
        return ref.request("await")

    return coroutine()


@types.coroutine
def _run_without_waiting(target: Any, on_wait: Callable[[], None]) -> Any:
    """Run an awaitable that never waits; if it does wait, call `on_wait`, which raises."""
    steps = target.__await__()
    try:
        steps.send(None) if hasattr(steps, "send") else next(steps)
    except StopIteration as end:
        return end.value
    on_wait()
    yield


def run_coroutine(target: Any, on_wait: Optional[Callable[[], None]] = None) -> Any:
    """Run an awaitable of this side to its end; see `_run_without_waiting` for `on_wait`."""
    import asyncio

    async def run() -> Any:
        return await (target if on_wait is None else _run_without_waiting(target, on_wait))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not _LOOPS:
            _LOOPS.append(asyncio.new_event_loop())
            asyncio.set_event_loop(_LOOPS[0])
        return _LOOPS[0].run_until_complete(run())
    import threading  # a loop of this thread waits for it

    results: list[tuple[bool, Any]] = []

    def work() -> None:
        try:
            results.append((True, asyncio.run(run())))
        except BaseException as error:
            results.append((False, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    has_succeeded, value = results[0]
    if not has_succeeded:
        raise value
    return value
