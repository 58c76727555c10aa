"""Repeats what fails while the process that it needs is away, since that process will be restarted;
within a bound, and where a person sees it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import TypeVar

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import MeshError, QuotaExceeded, StateUnavailable, StorageFull
from meshrl.common.mesh.runtime.calls.waits import WaitTable

T = TypeVar("T")
OUTAGE_ERRORS = (StateUnavailable, StorageFull)  # a person is told of them, and ends them
OUTAGE_LIMIT_S = 3600.0  # then the process ends by it, and is started again for as long as it lasts
PEER_LIMIT_S = 900.0  # a service is back within seconds, and has read what it needs within minutes
PERMANENT_ERROR_LIMIT_S = (
    60.0  # for errors that a repetition does not mend, unless what they read changes
)
MAX_WAIT_CHARS = 120  # characters of an error in a wait

# Where this process says whom it waits for; its mesh sets it.
CURRENT_WAITS: ContextVar[WaitTable | None] = ContextVar("waits", default=None)


class ServiceUnavailable(MeshError):
    """A service that should exist has no live lease at the moment."""

    code = "not_there"
    retryable = True


class RetryPolicy:
    """What a loop has that goes on after errors: how long nothing has succeeded, and for whom that
    makes it wait.
    """

    def __init__(self, clock: Clock, *, outage_s: float = OUTAGE_LIMIT_S) -> None:
        self._clock, self._outage_s, self._peer_s = clock, outage_s, min(PEER_LIMIT_S, outage_s)
        self._failing_since: float | None = None  # the first error
        self._no_outage_since = 0.0  # since when errors are of no outage
        self._published_wait = ExitStack()
        self._wait: tuple[str, str] = ("", "")

    def record_success(self) -> None:
        """What failed before does no longer."""
        if self._failing_since is not None:
            self._failing_since, self._wait = None, ("", "")
            self._published_wait.close()

    def record_failure(self, error: MeshError) -> None:
        """Returns while the loop may go on, and says meanwhile what it waits for; else raises
        `error`.
        """
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
        waits, wait = CURRENT_WAITS.get(), describe_wait(error)
        if waits is not None and wait != self._wait:
            self._published_wait.close()
            self._wait = wait
            self._published_wait.enter_context(
                waits.wait(*wait, waits.compute_start(now - self._failing_since))
            )

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._published_wait.close()


def describe_wait(error: MeshError) -> tuple[str, str]:
    """(what, on) of a wait for an error to be over."""
    if isinstance(error, StateUnavailable):
        return error.message[:MAX_WAIT_CHARS], "redis"
    if isinstance(error, QuotaExceeded):
        return error.message[:MAX_WAIT_CHARS], "quota"
    if isinstance(error, StorageFull):
        return f"room (at {error.where}): {error.message}"[:MAX_WAIT_CHARS], "disk"
    what = f"the end of {type(error).__name__}: {error.message}"
    return what[:MAX_WAIT_CHARS], error.where or "a repetition"


async def retry(
    clock: Clock,
    action: Callable[[], Awaitable[T]],
    *,
    interval_s: float = 0.5,
    limit_s: float = OUTAGE_LIMIT_S,
) -> T:
    """The result of `action()`, which is repeated every `every_s` seconds while it fails with a
    retryable error: for at most `for_s` while Redis is away or a disk is full, and for PEER_S, if
    that is shorter, for other reasons. Other errors go through.
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
