"""The faults of a run, drawn from its seed: what is killed, stopped, lost, late, away, full, cut
off, damaged or set wrong, when, and for how long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from meshrl.common.base.random import Random
from meshrl.sim.mesh.faults.damage import Spoiler
from meshrl.sim.mesh.world.world import World
from meshrl.sim.network import Faults
from meshrl.sim.process import VirtualProcess

LONGEST_STOP_S = 20.0
LONGEST_JUMP_S = 3600.0  # of a host's wall clock
SLOWEST_DISK_S = 4.0  # mean of what a piece of work waits
LEAST_ROOM = 4096  # bytes: a full disk refuses what is longer, after a part of it
# What a disk lies about before the power goes: which syncs it does not make.
LIES = {
    "all files": lambda path: True,
    "store": lambda path: path.startswith("store"),
    "versions": lambda path: path.startswith("store/jobs"),
    "checkpoints": lambda path: path.startswith("checkpoints"),
    "ledgers": lambda path: path.endswith(".ledger"),
}


@dataclass(frozen=True)
class FaultPace:
    """Mean seconds between two faults of a kind, and from its begin to its end."""

    every_s: float
    least_s: float
    most_s: float


PACES = {
    "kill": FaultPace(20.0, 0.0, 0.0),
    "stop": FaultPace(30.0, 0.3, LONGEST_STOP_S),
    "network": FaultPace(30.0, 0.5, 20.0),
    "redis": FaultPace(45.0, 0.2, 15.0),
    "disk": FaultPace(45.0, 1.0, 25.0),
    "clock": FaultPace(100.0, 0.0, 0.0),
    "power": FaultPace(60.0, 0.0, 0.0),
    "lies": FaultPace(60.0, 1.0, 20.0),
    "rollback": FaultPace(60.0, 1.0, 20.0),
    "damage": FaultPace(20.0, 0.0, 3.0),
}

KINDS = tuple(PACES)


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


class FaultSchedule:
    """Faults of the given kinds until `settle`, after which all is well again."""

    def __init__(
        self, world: World, random: Random, kinds: tuple[str, ...], pace: float = 1.0
    ) -> None:
        """`pace`: times as long between two faults as PACES says."""
        self._world, self._random, self._pace = world, random, pace
        self._clock = world.clock
        self.spoiler = Spoiler(world.root, world.beside("damaged"), random.child("damaged files"))
        if {"power", "lies", "rollback", "damage"} & set(kinds):
            world.machine.disk.watch()
        self._tasks = [
            asyncio.create_task(self._keep(kind, random.child(kind)), name=f"faults: {kind}")
            for kind in kinds
        ]
        self.count = dict.fromkeys(kinds, 0)

    async def settle(self) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):  # a defect of the simulation itself
                raise ended
        world = self._world
        world.record.say("settle")
        for process in list(world.machine.alive):
            process.resume()
        world.network.faults = Faults()
        world.network.mend()
        world.redis.well()
        world.machine.disk.well()
        world.machine.disk.lies = None
        world.switch_on()

    async def _keep(self, kind: str, random: Random) -> None:
        pace = PACES[kind]
        faults: dict[str, Callable[[Random, float], Awaitable[None]]] = {
            "kill": self._kill,
            "stop": self._stop,
            "network": self._network,
            "redis": self._redis,
            "disk": self._disk,
            "clock": self._jump,
            "power": self._power,
            "lies": self._lie,
            "rollback": self._roll_back,
            "damage": self._damage,
        }
        while True:
            await self._clock.sleep(random.expovariate(1 / (pace.every_s * self._pace)))
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
                redis.restart()
            case "away":
                redis.away = True
            case "slow":
                redis.slow_s = random.uniform(0.02, 1.0)
            case "lost":
                redis.lost = random.uniform(0.02, 0.4)
        await self._clock.sleep(for_s)
        redis.well()

    async def _disk(self, random: Random, for_s: float) -> None:
        disk = self._world.machine.disk
        what = random.choice(["full", "nearly full", "slow"])
        self._world.record.say(f"disk {what} {for_s:.3f}")
        match what:
            case "full":
                disk.room = 0
            case "nearly full":
                disk.room = random.randrange(LEAST_ROOM)
            case "slow":
                disk.slow_s = random.uniform(0.05, SLOWEST_DISK_S)
        await self._clock.sleep(for_s)
        disk.well()

    async def _jump(self, random: Random, for_s: float) -> None:
        by_s = random.uniform(-LONGEST_JUMP_S, LONGEST_JUMP_S)
        whose = random.choice(["both", "host", "redis"])
        self._world.record.say(f"clock {whose} {by_s:.3f}")
        if whose != "redis":
            self._world.clock.offset_s += by_s
        if whose != "host":
            self._world.redis.clock.offset_s += by_s

    async def _power(self, random: Random, for_s: float) -> None:
        """The power goes; what was synced is there, all that Redis has answered too."""
        await self._world.power_cut(random, self._world.redis.server.copy())

    async def _lie(self, random: Random, for_s: float) -> None:
        """The power goes after a while in which some syncs were none."""
        world = self._world
        what = random.choice(sorted(LIES))
        world.record.say(f"the disk lies about {what} for {for_s:.3f}")
        world.machine.disk.lies = LIES[what]
        await self._clock.sleep(for_s)
        await world.power_cut(random, world.redis.server.copy())

    async def _roll_back(self, random: Random, for_s: float) -> None:
        """Redis comes back as it was a while ago, alone or with all processes, or it cannot load
        what it has. (With all files as they were then nobody could tell; nor where the power has
        gone just now, with what told of the last seconds.)
        """
        world, held = self._world, self._world.redis.server.copy()
        what = random.choice(["older", "alone", "unloadable"])
        world.record.say(f"redis will be {what} in {for_s:.3f}")
        await self._clock.sleep(for_s)
        match what:
            case "older" if world.on:
                await world.redis_lost(held)
            case "alone" if world.on:
                world.redis.restart(held)
            case "unloadable":
                await world.redis_lost(None)

    async def _damage(self, random: Random, for_s: float) -> None:
        damage = self.spoiler.spoil()
        if damage is None:
            return
        self._world.record.say(f"damage {damage.kind} {damage.how} {damage.path}")
        await self._clock.sleep(for_s)
        match random.choice(["kill", "kill", "power", "nothing"]):
            case "kill":
                await self._kill(random, 0.0)
            case "power":
                await self._world.power_cut(random, self._world.redis.server.copy())
