"""Coroutines across two jails: one runs to its end where it is, while the other side waits."""

from __future__ import annotations

import types
from typing import Any, Callable, Optional

_LOOPS: list[Any] = []  # the one of this process, which objects of asyncio may belong to


def make_remote_coroutine(ref: Any) -> Any:
    async def coroutine() -> Any:
        return ref.ask("await")

    return coroutine()


@types.coroutine
def _run_without_waiting(target: Any, on_wait: Callable[[], None]) -> Any:
    """Run an awaitable that ends without a wait; otherwise call `on_wait`, which raises."""
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

    async def waited() -> Any:
        return await (target if on_wait is None else _run_without_waiting(target, on_wait))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not _LOOPS:
            _LOOPS.append(asyncio.new_event_loop())
            asyncio.set_event_loop(_LOOPS[0])
        return _LOOPS[0].run_until_complete(waited())
    import threading  # a loop of this thread waits for it

    found: list[Any] = []

    def work() -> None:
        try:
            found.append((True, asyncio.run(waited())))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    fine, value = found[0]
    if not fine:
        raise value
    return value
