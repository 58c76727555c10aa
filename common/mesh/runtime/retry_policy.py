"""Retries while a needed process is unavailable, since it will be restarted.

Retries are bounded, and the wait is published.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import TypeVar

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import (
    MeshError,
    QuotaExceeded,
    StateUnavailable,
    StillStarting,
    StorageFull,
)
from meshrl.common.mesh.runtime.calls.waits import WaitTable

T = TypeVar("T")
OUTAGE_ERRORS = (StateUnavailable, StorageFull)  # outages that are reported, and that a person ends
OUTAGE_LIMIT_S = (
    3600.0  # seconds until the process exits by it; it is restarted while the outage lasts
)
PEER_LIMIT_S = (
    900.0  # seconds; a service restarts within seconds and loads its state within minutes
)
PERMANENT_ERROR_LIMIT_S = 60.0  # for errors that persist unless their input changes
MAX_WAIT_CHARS = 120  # characters of an error in a wait

# Published waits of this process; its mesh sets them.
CURRENT_WAITS: ContextVar[WaitTable | None] = ContextVar("waits", default=None)


class ServiceUnavailable(MeshError):
    """Error raised while a service that should exist has no live lease."""

    code = "not_there"
    retryable = True


class RetryPolicy:
    """Retry state of a loop: how long it has failed without a success, and its published wait."""

    def __init__(self, clock: Clock, *, outage_s: float = OUTAGE_LIMIT_S) -> None:
        self._clock, self._outage_s, self._peer_s = clock, outage_s, min(PEER_LIMIT_S, outage_s)
        self._failing_since: float | None = None  # monotonic time of the first error
        self._no_outage_since = 0.0  # monotonic time of the last outage's end
        self._published_wait = ExitStack()
        self._wait: tuple[str, str] = ("", "")

    def record_success(self) -> None:
        """Record a success: the failure is over."""
        self._failing_since, self._wait = None, ("", "")
        self._published_wait.close()

    def record_failure(self, error: MeshError) -> None:
        """Record a failure and publish the wait; raise `error` once the loop must not continue.

        StillStarting is no failure, but only a wait.
        """
        if isinstance(error, StillStarting):
            self._publish_wait(error, 0.0)
            return
        now = self._clock.monotonic()
        outage = isinstance(error, OUTAGE_ERRORS)
        if self._failing_since is None:
            self._failing_since = self._no_outage_since = now
        if outage:
            self._no_outage_since = now
        peer_s = self._peer_s if error.retryable else min(PERMANENT_ERROR_LIMIT_S, self._peer_s)
        if now - (self._failing_since if outage else self._no_outage_since) > (
            self._outage_s if outage else peer_s
        ):
            self._published_wait.close()
            raise error
        self._publish_wait(error, now - self._failing_since)

    def _publish_wait(self, error: MeshError, waited_s: float) -> None:
        waits, wait = CURRENT_WAITS.get(), describe_wait(error)
        if waits is not None and wait != self._wait:
            self._published_wait.close()
            self._wait = wait
            self._published_wait.enter_context(waits.wait(*wait, waits.compute_start(waited_s)))

    def close(self) -> None:
        """Withdraw the published wait."""
        self._published_wait.close()


def describe_wait(error: MeshError) -> tuple[str, str]:
    """Describe the wait for an error to end as (what, on)."""
    if isinstance(error, StateUnavailable):
        return error.message[:MAX_WAIT_CHARS], "redis"
    if isinstance(error, QuotaExceeded):
        return error.message[:MAX_WAIT_CHARS], "quota"
    if isinstance(error, StorageFull):
        return f"disk space (at {error.where}): {error.message}"[:MAX_WAIT_CHARS], "disk"
    what = f"the end of {type(error).__name__}: {error.message}"
    return what[:MAX_WAIT_CHARS], error.where or "a retry"


async def retry(
    clock: Clock,
    action: Callable[[], Awaitable[T]],
    *,
    interval_s: float = 0.5,
    limit_s: float = OUTAGE_LIMIT_S,
) -> T:
    """Run `action()` every `interval_s` seconds while it raises a retryable error; return its
    result.

    Retries end after `limit_s` seconds of a Redis outage or a full disk. For other reasons they end
    after PEER_LIMIT_S, if that is shorter. Other errors propagate.
    """
    patience: RetryPolicy | None = None
    try:
        while True:
            try:
                return await action()
            except MeshError as error:
                if not error.retryable:
                    raise
                patience = patience or RetryPolicy(clock, outage_s=limit_s)
                patience.record_failure(error)
            await clock.sleep(interval_s)
    finally:
        if patience is not None:
            patience.close()
