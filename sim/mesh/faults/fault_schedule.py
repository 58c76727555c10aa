"""Faults of a run, drawn from its seed, with their times and durations.

The kinds are kills, stops, losses, delays, outages, full disks, partitions, corruption and clock
changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from meshrl.common.base.random import Random
from meshrl.sim.mesh.faults.corruption import FileCorruptor
from meshrl.sim.mesh.runtime.virtual_mesh import VirtualMesh
from meshrl.sim.virtual_network import NetworkFaults
from meshrl.sim.virtual_process import VirtualProcess

MAX_STOP_S = 20.0
MAX_CLOCK_JUMP_S = 3600.0  # of a host's wall clock
MAX_DISK_DELAY_S = 4.0  # mean delay of a disk operation
MAX_PARTIAL_WRITE_BYTES = 4096  # a full disk rejects longer writes after a part of them
# Syncs that a lying disk skips before a power cut.
SKIPPED_SYNCS = {
    "all files": lambda path: True,
    "store": lambda path: path.startswith("store"),
    "versions": lambda path: path.startswith("store/jobs"),
    "checkpoints": lambda path: path.startswith("checkpoints"),
    "ledgers": lambda path: path.endswith(".ledger"),
}


@dataclass(frozen=True)
class FaultTiming:
    """Mean seconds between two faults of a kind, and mean duration of a fault."""

    mean_interval_s: float
    min_duration_s: float
    max_duration_s: float


FAULT_TIMINGS = {
    "kill": FaultTiming(20.0, 0.0, 0.0),
    "stop": FaultTiming(30.0, 0.3, MAX_STOP_S),
    "network": FaultTiming(30.0, 0.5, 20.0),
    "redis": FaultTiming(45.0, 0.2, 15.0),
    "disk": FaultTiming(45.0, 1.0, 25.0),
    "clock": FaultTiming(100.0, 0.0, 0.0),
    "power": FaultTiming(60.0, 0.0, 0.0),
    "lies": FaultTiming(60.0, 1.0, 20.0),
    "rollback": FaultTiming(60.0, 1.0, 20.0),
    "damage": FaultTiming(20.0, 0.0, 3.0),
}

FAULT_KINDS = tuple(FAULT_TIMINGS)


def parse_kinds(text: str) -> tuple[str, ...]:
    """Parse a list of kinds with commas, or `all` or `none`; raise ValueError for an unknown
    one.
    """
    named = {"all": FAULT_KINDS, "none": ()}.get(text)
    if named is not None:
        return named
    chosen = text.split(",")
    unknown = [kind for kind in chosen if kind not in FAULT_KINDS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(FAULT_KINDS)}, all, none")
    return tuple(kind for kind in FAULT_KINDS if kind in chosen)


class FaultSchedule:
    """Schedule of faults of the given kinds until `settle`, after which all faults are cleared."""

    def __init__(
        self, mesh: VirtualMesh, random: Random, kinds: tuple[str, ...], interval_scale: float = 1.0
    ) -> None:
        """Create a schedule. `interval_scale`: factor of the times between two faults."""
        self._mesh, self._random, self._interval_scale = mesh, random, interval_scale
        self._clock = mesh.clock
        self.corruptor = FileCorruptor(
            mesh.root, mesh.get_side_directory("damaged"), random.child("damaged files")
        )
        if {"power", "lies", "rollback", "damage"} & set(kinds):
            mesh.machine.disk.start_tracking()
        self._tasks = [
            asyncio.create_task(self._run_kind(kind, random.child(kind)), name=f"faults: {kind}")
            for kind in kinds
        ]
        self.counts = dict.fromkeys(kinds, 0)

    async def stop_and_repair(self) -> None:
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):  # a defect of the simulation itself
                raise outcome
        world = self._mesh
        world.record.log_event("settle")
        for process in list(world.machine.live_processes):
            process.resume()
        world.network.faults = NetworkFaults()
        world.network.heal_all()
        world.redis.clear_faults()
        world.machine.disk.clear_faults()
        world.machine.disk.skips_sync = None
        world.start_if_off()

    async def _run_kind(self, kind: str, random: Random) -> None:
        pace = FAULT_TIMINGS[kind]
        faults: dict[str, Callable[[Random, float], Awaitable[None]]] = {
            "kill": self._kill_process,
            "stop": self._stop_process,
            "network": self._disturb_network,
            "redis": self._disturb_redis,
            "disk": self._disturb_disk,
            "clock": self._jump_clock,
            "power": self._cut_power,
            "lies": self._skip_syncs,
            "rollback": self._roll_back_redis,
            "damage": self._corrupt_file,
        }
        while True:
            await self._clock.sleep(
                random.expovariate(1 / (pace.mean_interval_s * self._interval_scale))
            )
            self.counts[kind] += 1
            await faults[kind](random, random.uniform(pace.min_duration_s, pace.max_duration_s))

    def _choose_victim(self, random: Random) -> VirtualProcess | None:
        """Choose a process other than the root. The kind is drawn first, as there are many workers
        and one store.
        """
        there = [p for p in self._mesh.machine.live_processes if p.parent is not None]
        if not there:
            return None
        kind = random.choice(sorted({process.kind for process in there}))
        return random.choice([process for process in there if process.kind == kind])

    async def _kill_process(self, random: Random, duration_s: float) -> None:
        victim = self._choose_victim(random)
        if victim is not None:
            victim.kill()

    async def _stop_process(self, random: Random, duration_s: float) -> None:
        victim = self._choose_victim(random)
        if victim is not None:
            victim.stop()
            await self._clock.sleep(duration_s)
            victim.resume()

    async def _disturb_network(self, random: Random, duration_s: float) -> None:
        network = self._mesh.network
        what = random.choice(["loss", "duplication", "reorder", "latency", "partition"])
        self._mesh.record.log_event(f"network {what} {duration_s:.3f}")
        match what:
            case "loss":
                network.faults = NetworkFaults(loss=random.uniform(0.02, 0.3))
            case "duplication":
                network.faults = NetworkFaults(duplication=random.uniform(0.1, 0.5))
            case "reorder":
                network.faults = NetworkFaults(reorder=0.5, reorder_s=random.uniform(0.05, 2.0))
            case "latency":
                network.faults = NetworkFaults(latency_s=random.uniform(0.05, 1.0), jitter_s=0.5)
            case "partition":
                ends = network.addresses
                if len(ends) > 1:
                    network.partition(*random.sample(ends, 2))
        await self._clock.sleep(duration_s)
        network.faults = NetworkFaults()
        network.heal_all()

    async def _disturb_redis(self, random: Random, duration_s: float) -> None:
        redis = self._mesh.redis
        what = random.choice(["away", "slow", "lost", "away", "slow", "lost", "emptied"])
        self._mesh.record.log_event(f"redis {what} {duration_s:.3f}")
        match what:
            case "emptied":
                redis.restart()
            case "away":
                redis.is_unreachable = True
            case "slow":
                redis.mean_latency_s = random.uniform(0.02, 1.0)
            case "lost":
                redis.reply_loss = random.uniform(0.02, 0.4)
        await self._clock.sleep(duration_s)
        redis.clear_faults()

    async def _disturb_disk(self, random: Random, duration_s: float) -> None:
        disk = self._mesh.machine.disk
        what = random.choice(["full", "nearly full", "slow"])
        self._mesh.record.log_event(f"disk {what} {duration_s:.3f}")
        match what:
            case "full":
                disk.max_file_bytes = 0
            case "nearly full":
                disk.max_file_bytes = random.randrange(MAX_PARTIAL_WRITE_BYTES)
            case "slow":
                disk.mean_delay_s = random.uniform(0.05, MAX_DISK_DELAY_S)
        await self._clock.sleep(duration_s)
        disk.clear_faults()

    async def _jump_clock(self, random: Random, duration_s: float) -> None:
        by_s = random.uniform(-MAX_CLOCK_JUMP_S, MAX_CLOCK_JUMP_S)
        target = random.choice(["both", "host", "redis"])
        self._mesh.record.log_event(f"clock {target} {by_s:.3f}")
        if target != "redis":
            self._mesh.clock.offset_s += by_s
        if target != "host":
            self._mesh.redis.clock.offset_s += by_s

    async def _cut_power(self, random: Random, duration_s: float) -> None:
        """Cut the power; synced data and all answered Redis commands survive."""
        await self._mesh.cut_power(random, self._mesh.redis.server.copy_state())

    async def _skip_syncs(self, random: Random, duration_s: float) -> None:
        """Cut the power after a period in which some syncs were skipped."""
        world = self._mesh
        what = random.choice(sorted(SKIPPED_SYNCS))
        world.record.log_event(f"the disk skips {what} syncs for {duration_s:.3f}")
        world.machine.disk.skips_sync = SKIPPED_SYNCS[what]
        await self._clock.sleep(duration_s)
        await world.cut_power(random, world.redis.server.copy_state())

    async def _roll_back_redis(self, random: Random, duration_s: float) -> None:
        """Roll back Redis to an older copy, alone or with all processes, or make its file
        unloadable.

        A rollback of all files as well would be undetectable. So would a rollback just after a
        power cut, which lost the records of the last seconds.
        """
        world, older_state = self._mesh, self._mesh.redis.server.copy_state()
        what = random.choice(["older", "alone", "unloadable"])
        world.record.log_event(f"rollback of redis ({what}) in {duration_s:.3f}")
        await self._clock.sleep(duration_s)
        match what:
            case "older" if world.is_on:
                await world.lose_redis(older_state)
            case "alone" if world.is_on:
                world.redis.restart(older_state)
            case "unloadable":
                await world.lose_redis(None)

    async def _corrupt_file(self, random: Random, duration_s: float) -> None:
        damage = self.corruptor.corrupt_file()
        if damage is None:
            return
        self._mesh.record.log_event(f"damage {damage.kind} {damage.method} {damage.path}")
        await self._clock.sleep(duration_s)
        match random.choice(["kill", "kill", "power", "nothing"]):
            case "kill":
                await self._kill_process(random, 0.0)
            case "power":
                await self._mesh.cut_power(random, self._mesh.redis.server.copy_state())
