"""Event loop of a service's process: uvloop, enough file descriptors, clean-up on a signal."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

MIN_DESCRIPTORS = 65_536  # each peer takes a few
GC_THRESHOLDS = (
    20_000,
    20,
    50,
)  # allocations, and generations: messages are short-lived and without cycles


def run_service(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a service on uvloop. SIGTERM and SIGINT cancel `main`, which then cleans up.

    A second signal ends the process at once.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_DESCRIPTORS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MIN_DESCRIPTORS), hard))
    gc.collect()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.freeze()  # imports stay, so later collections skip them
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run_until_signal(main))


async def _run_until_signal(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(main(), name="main")
    signalled = False

    def stop() -> None:
        nonlocal signalled
        signalled = True
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not signalled:
            raise
