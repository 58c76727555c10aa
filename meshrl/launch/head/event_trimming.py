"""Periodic trimming of a mesh's event stream, the only place that trims it."""

from __future__ import annotations

import contextlib

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.state import readers
from meshrl.common.state.redis.client import StateClient

TRIM_INTERVAL_S = 10.0  # at 100 events a second, which is a fast job, some 300 kB come in that time
TRIM_TIMEOUT_S = 4.0


async def trim_forever(state: StateClient, clock: Clock) -> None:
    """Trim events that all readers have read; retry later while Redis is away. Never returns."""
    up_since_ms: int | None = None
    while True:
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            async with clock.timeout(TRIM_TIMEOUT_S, "trimming the event stream"):
                if up_since_ms is None:
                    seconds, micros = await state.run_command("TIME")
                    up_since_ms = int(seconds) * 1000 + int(micros) // 1000
                await readers.trim_events(state, up_since_ms)
        await clock.sleep(TRIM_INTERVAL_S)
