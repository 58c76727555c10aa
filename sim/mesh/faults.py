"""The faults of a run, drawn from its seed: what is killed, stopped, lost, late, away, full or set
wrong, when, and for how long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.random import Random
from sim.machine import LATENCY_S as DISK_LATENCY_S
from sim.mesh.redis import LATENCY_S as REDIS_LATENCY_S
from sim.mesh.world import World
from sim.network import Faults
from sim.process import VirtualProcess

KINDS = ("kill", "stop", "network", "redis", "disk", "clock")
LONGEST_STOP_S = 20.0
LONGEST_JUMP_S = 3600.0  # of a host's wall clock


@dataclass(frozen=True)
class Pace:
    """Mean seconds between two faults of a kind, and from its begin to its end."""

    every_s: float
    least_s: float
    most_s: float


PACES = {
    "kill": Pace(20.0, 0.0, 0.0),
    "stop": Pace(30.0, 0.3, LONGEST_STOP_S),
    "network": Pace(30.0, 0.5, 20.0),
    "redis": Pace(45.0, 0.2, 15.0),
    "disk": Pace(45.0, 1.0, 25.0),
    "clock": Pace(100.0, 0.0, 0.0),
}


def kinds_of(text: str) -> tuple[str, ...]:
    """The kinds in a list with commas, or of `all` or `none`. ValueError: an unknown one."""
    named = {"all": KINDS, "none": ()}.get(text)
    if named is not None:
        return named
    chosen = text.split(",")
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(KINDS)}, all, none")
    return tuple(kind for kind in KINDS if kind in chosen)


class Schedule:
    """Faults of the given kinds until `settle`, after which all is well again."""

    def __init__(self, world: World, random: Random, kinds: tuple[str, ...]) -> None:
        self._world, self._random = world, random
        self._clock = world.clock
        self._tasks = [
            asyncio.create_task(self._keep(kind, random.child(kind)), name=f"faults: {kind}")
            for kind in kinds
        ]
        self.count = dict.fromkeys(kinds, 0)

    async def settle(self) -> None:
        """Ends the faults, and what they left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        world = self._world
        world.record.say("settle")
        for process in list(world.machine.alive):
            process.resume()
        world.network.faults = Faults()
        world.network.mend()
        world.redis.away, world.redis.slow_s, world.redis.lost = False, REDIS_LATENCY_S, 0.0
        world.machine.disk.full, world.machine.disk.slow_s = False, DISK_LATENCY_S
        await world.resume()  # if Redis was emptied last

    async def _keep(self, kind: str, random: Random) -> None:
        pace = PACES[kind]
        faults: dict[str, Callable[[Random, float], Awaitable[None]]] = {
            "kill": self._kill,
            "stop": self._stop,
            "network": self._network,
            "redis": self._redis,
            "disk": self._disk,
            "clock": self._jump,
        }
        while True:
            await self._clock.sleep(random.expovariate(1 / pace.every_s))
            self.count[kind] += 1
            await faults[kind](random, random.uniform(pace.least_s, pace.most_s))

    def _victim(self, random: Random) -> VirtualProcess | None:
        """Any process but the root, of a kind drawn first: there are many workers and one store."""
        there = [p for p in self._world.machine.alive if p.parent is not None]
        if not there:
            return None
        kind = random.choice(sorted({process.kind for process in there}))
        return random.choice([process for process in there if process.kind == kind])

    async def _kill(self, random: Random, for_s: float) -> None:
        victim = self._victim(random)
        if victim is not None:
            victim.kill()

    async def _stop(self, random: Random, for_s: float) -> None:
        victim = self._victim(random)
        if victim is not None:
            victim.stop()
            await self._clock.sleep(for_s)
            victim.resume()

    async def _network(self, random: Random, for_s: float) -> None:
        network = self._world.network
        what = random.choice(["loss", "duplication", "reorder", "latency", "partition"])
        self._world.record.say(f"network {what} {for_s:.3f}")
        match what:
            case "loss":
                network.faults = Faults(loss=random.uniform(0.02, 0.3))
            case "duplication":
                network.faults = Faults(duplication=random.uniform(0.1, 0.5))
            case "reorder":
                network.faults = Faults(reorder=0.5, reorder_s=random.uniform(0.05, 2.0))
            case "latency":
                network.faults = Faults(latency_s=random.uniform(0.05, 1.0), jitter_s=0.5)
            case "partition":
                ends = network.addresses
                if len(ends) > 1:
                    network.partition(*random.sample(ends, 2))
        await self._clock.sleep(for_s)
        network.faults = Faults()
        network.mend()

    async def _redis(self, random: Random, for_s: float) -> None:
        redis = self._world.redis
        what = random.choice(["away", "slow", "lost", "away", "slow", "lost", "emptied"])
        self._world.record.say(f"redis {what} {for_s:.3f}")
        match what:
            case "emptied":
                redis.server.lose()
            case "away":
                redis.away = True
            case "slow":
                redis.slow_s = random.uniform(0.02, 1.0)
            case "lost":
                redis.lost = random.uniform(0.02, 0.4)
        await self._clock.sleep(for_s)
        redis.away, redis.slow_s, redis.lost = False, REDIS_LATENCY_S, 0.0
        if what == "emptied":
            await self._world.resume()

    async def _disk(self, random: Random, for_s: float) -> None:
        disk = self._world.machine.disk
        what = random.choice(["full", "slow"])
        self._world.record.say(f"disk {what} {for_s:.3f}")
        if what == "full":
            disk.full = True
        else:
            disk.slow_s = random.uniform(0.05, 1.0)
        await self._clock.sleep(for_s)
        disk.full, disk.slow_s = False, DISK_LATENCY_S

    async def _jump(self, random: Random, for_s: float) -> None:
        by_s = random.uniform(-LONGEST_JUMP_S, LONGEST_JUMP_S)
        self._world.record.say(f"clock {by_s:.3f}")
        self._world.clock.offset_s += by_s
