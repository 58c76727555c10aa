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
OUTAGES = (StateUnavailable, StorageFull)  # a person is told of them, and ends them
OUTAGE_S = 3600.0  # then the process ends by it, and is started again for as long as it lasts
PEER_S = 900.0  # a service is back within seconds, and has read what it needs within minutes
HOPELESS_S = 60.0  # for errors that a repetition does not mend, unless what they read changes
SAID = 120  # characters of an error in a wait

# Where this process says whom it waits for; its mesh sets it.
WAITS: ContextVar[WaitTable | None] = ContextVar("waits", default=None)


class NotThere(MeshError):
    """A service that should exist has no live lease at the moment."""

    code = "not_there"
    retryable = True


class Patience:
    """What a loop has that goes on after errors: how long nothing has succeeded, and for whom that
    makes it wait.
    """

    def __init__(self, clock: Clock, *, outage_s: float = OUTAGE_S) -> None:
        self._clock, self._outage_s, self._peer_s = clock, outage_s, min(PEER_S, outage_s)
        self._since: float | None = None  # the first error
        self._without_outage = 0.0  # since when errors are of no outage
        self._said = ExitStack()
        self._told: tuple[str, str] = ("", "")

    def succeeded(self) -> None:
        """What failed before does no longer."""
        if self._since is not None:
            self._since, self._told = None, ("", "")
            self._said.close()

    def failed(self, error: MeshError) -> None:
        """Returns while the loop may go on, and says meanwhile what it waits for; else raises
        `error`.
        """
        now = self._clock.monotonic()
        outage = isinstance(error, OUTAGES)
        if self._since is None:
            self._since = self._without_outage = now
        if outage:
            self._without_outage = now
        peer_s = self._peer_s if error.retryable else min(HOPELESS_S, self._peer_s)
        if now - (self._since if outage else self._without_outage) > (
            self._outage_s if outage else peer_s
        ):
            self._said.close()
            raise error
        waits, wait = WAITS.get(), waited_for(error)
        if waits is not None and wait != self._told:
            self._said.close()
            self._told = wait
            self._said.enter_context(waits.wait(*wait, waits.began(now - self._since)))

    def over(self) -> None:
        """Nothing is waited for any more."""
        self._said.close()


def waited_for(error: MeshError) -> tuple[str, str]:
    """(what, on) of a wait for an error to be over."""
    if isinstance(error, StateUnavailable):
        return error.message[:SAID], "redis"
    if isinstance(error, QuotaExceeded):
        return error.message[:SAID], "quota"
    if isinstance(error, StorageFull):
        return f"room (at {error.where}): {error.message}"[:SAID], "disk"
    what = f"the end of {type(error).__name__}: {error.message}"
    return what[:SAID], error.where or "a repetition"


async def patiently(
    clock: Clock,
    action: Callable[[], Awaitable[T]],
    *,
    every_s: float = 0.5,
    for_s: float = OUTAGE_S,
) -> T:
    """The result of `action()`, which is repeated every `every_s` seconds while it fails with a
    retryable error: for at most `for_s` while Redis is away or a disk is full, and for PEER_S, if
    that is shorter, for other reasons. Other errors go through.
    """
    patience: Patience | None = None
    try:
        while True:
            try:
                return await action()
            except MeshError as error:
                if not error.retryable:
                    raise
                patience = patience or Patience(clock, outage_s=for_s)
                patience.failed(error)
            await clock.sleep(every_s)
    finally:
        if patience is not None:
            patience.over()
