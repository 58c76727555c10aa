"""Comparison of child processes with their leases: it frees the names of exited, and finds stopped
ones.

A process under SIGSTOP runs, for the kernel, and renews nothing. A process that could not reach
Redis looks the same at first. So an expiry counts only after 2 s of good answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.state import registry
from meshrl.common.state.redis.client import StateClient

INTERVAL_S = 0.7
EXPIRED_FOR_S = 2.0  # observed expiry before a process counts as stopped
GRACE_S = 10.0  # seconds after an outage of Redis, while all processes register again
REDIS_TIMEOUT_S = 2.0  # per lookup; slower answers count as an outage


class LeaseWatch:
    """Watch of the leases of `children`; `host` is this machine's id in the registry."""

    def __init__(
        self,
        state: StateClient,
        clock: Clock,
        host: str,
        children: Callable[[], Iterable[ChildProcess]],
    ) -> None:
        self._state, self._clock, self._host = state, clock, host
        self._children = children
        self._expired_since: dict[tuple[str, int], float] = {}
        self._to_evict: dict[str, int] = {}  # name -> pid of an exited process, not yet evicted
        self._no_verdict_before = 0.0
        self._last_answer_at = clock.monotonic()

    async def run(self) -> None:
        """Check leases every `INTERVAL_S` until cancelled."""
        while True:
            await self._clock.sleep(INTERVAL_S)
            await self.check_leases()

    async def check_leases(self) -> None:
        """Compare all children with their leases once.

        It gives no verdict while Redis does not answer, nor for a while after.
        """
        try:
            async with self._clock.timeout(REDIS_TIMEOUT_S, "the check of the leases"):
                for name, pid in list(self._to_evict.items()):
                    await self._evict(name, pid)
                expired = await self._find_expired()
        except (StateUnavailable, DeadlineExceeded):
            return
        now = self._clock.monotonic()
        if now - self._last_answer_at > 2 * INTERVAL_S + REDIS_TIMEOUT_S:
            self._no_verdict_before = now + GRACE_S
        self._last_answer_at = now
        before = self._expired_since if now >= self._no_verdict_before else {}
        keys = [(child.name, child.pid) for child in expired]
        self._expired_since = {key: before.get(key, now) for key in keys}

    def has_expired(self, child: ChildProcess) -> bool:
        """Return True if the child's lease has been expired for `EXPIRED_FOR_S` seconds."""
        since = self._expired_since.get((child.name, child.pid))
        now = self._clock.monotonic()
        return since is not None and now - since >= EXPIRED_FOR_S and now >= self._no_verdict_before

    async def evict(self, child: ChildProcess) -> None:
        """Free the registry name of a child that has exited; later, if Redis is unavailable now."""
        self._to_evict[child.name] = child.pid
        try:
            async with self._clock.timeout(REDIS_TIMEOUT_S, "the eviction of a dead process"):
                await self._evict(child.name, child.pid)
        except (StateUnavailable, DeadlineExceeded):
            return

    async def _evict(self, name: str, pid: int) -> None:
        entry = await registry.lookup(self._state, name)
        if entry is not None and (entry.host, entry.pid) == (self._host, pid):
            await registry.evict(self._state, name, entry.incarnation)
        if self._to_evict.get(name) == pid:
            del self._to_evict[name]

    async def _find_expired(self) -> list[ChildProcess]:
        """Return the children whose leases have ended."""
        children = {child.name: child for child in self._children()}
        known = await registry.lookup_all(self._state, list(children)) if children else {}
        expired = {
            (entry.name, entry.host, entry.pid) for entry in known.values() if not entry.alive
        }
        return [c for c in children.values() if (c.name, self._host, c.pid) in expired]
