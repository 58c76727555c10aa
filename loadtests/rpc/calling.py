"""Calls by one way: how many a second, and what both processes use for one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from loadtests.measuring.processes import cpu_s
from loadtests.measuring.rounds import turns

WARM_S = 0.3  # of each way before rounds begin, at most
K = TypeVar("K", bound=Hashable)


class Measured(NamedTuple):
    """One round of a way."""

    calls_per_s: float
    cpu_us: float  # CPU-microseconds of a call, in both processes


@dataclass(frozen=True)
class Way:
    """A call, the process that answers it, and how many are in flight."""

    one: Callable[[], Awaitable[object]]
    server: int
    in_flight: int

    async def measure(self, seconds: float) -> Measured:
        """Call for so long."""
        done, pids = 0, (os.getpid(), self.server)
        cpu, start = cpu_s(*pids), time.perf_counter()

        async def work() -> None:
            nonlocal done
            while time.perf_counter() < start + seconds:
                await self.one()
                done += 1

        await asyncio.gather(*(work() for _ in range(self.in_flight)))
        took = time.perf_counter() - start
        return Measured(done / took, 1e6 * (cpu_s(*pids) - cpu) / done)


async def measured(ways: Mapping[K, Way], rounds: int, seconds: float) -> dict[K, list[Measured]]:
    """Return each way's rounds, in rotating order."""
    found: dict[K, list[Measured]] = {name: [] for name in ways}
    for way in ways.values():
        await way.measure(min(WARM_S, seconds))
    for name in turns([*ways], rounds):
        found[name].append(await ways[name].measure(seconds))
    return found
