"""Faults of a shared gang, drawn from a seed: phases of role processes, services, resources."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from meshrl.common.base.errors import MeshError
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.diagnosis.host_limits import FreeSpace
from meshrl.sim.virtual_network import NetworkFaults
from meshrl.sim.virtual_process import VirtualProcess
from tests.mesh.simulated.sharing.world import JOBS, SharedGang

PHASES = ("granted", "load", "prefetch", "computing", "offload", "write_back")
PHASE_WAIT_S = 10.0  # until a process is in a phase
POLL_S = 0.05
MEAN_INTERVAL_S = 3.0  # between two faults
HANG_S = (0.5, 25.0)  # slow, or so long that its lease or its time slice ends
REDIS_AWAY_S = (2.0, 60.0)
SERVICES = ("worker/w0", "worker", "node", "planner")  # by name, or by kind
FULL_S = (3.0, 20.0)


class SharedFaults:
    """Faults of one run, one after another and partly at the same time."""

    def __init__(self, world: SharedGang, random: Random) -> None:
        self.world, self.random, self._clock = world, random, world.clock
        self.counts: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, count: int, planned: Sequence[str] = ()) -> None:
        """Inject the planned faults, or so many drawn ones; end when all have ended."""
        kinds: list[Callable[[Random], str]] = [
            *[self._draw_phase] * 4,
            *[self._draw_service] * 2,
            *[self._draw_resource] * 2,
            self._draw_place,
        ]
        for number in range(len(planned) or count):
            random = self.random.child(str(number))
            await self._clock.sleep(random.expovariate(1 / MEAN_INTERVAL_S))
            what = planned[number] if planned else random.choice(kinds)(random)
            self.world.record.log_event(f"fault {what}")
            self.counts[what.partition(" of ")[0]] = 1
            task = asyncio.create_task(self._inject(what, random), name=f"fault: {what}")
            self._tasks.append(task)
        await asyncio.gather(*self._tasks)

    def repair(self) -> None:
        world = self.world
        world.record.log_event("settle")
        for process in list(world.machine.live_processes):
            process.resume()
        world.network.faults = NetworkFaults()
        world.network.heal_all()
        world.redis.clear_faults()
        world.machine.disk.clear_faults()
        world.machine.free_space = None

    def _draw_phase(self, random: Random) -> str:
        return f"{random.choice(['kill', 'kill', 'hang'])} in {random.choice(PHASES)}"

    def _draw_service(self, random: Random) -> str:
        return f"{random.choice(['kill', 'kill', 'hang'])} of {random.choice(SERVICES)}"

    def _draw_resource(self, random: Random) -> str:
        return random.choice(["redis", "disk", "memory", "partition", "loss", "latency"])

    def _draw_place(self, random: Random) -> str:
        return random.choice(["apart", "together", "kill in move of planner"])

    async def _inject(self, what: str, random: Random) -> None:
        if " in move of " in what:
            action, _, name = what.partition(" in move of ")
            await self._wait_for_phases(("load", "offload"), random)
            victim = self._choose(name, random)
            await self._harm(self.world.leader or victim, action, random)
        elif " in " in what:
            action, _, phase = what.partition(" in ")
            victim = await self._wait_for_phases((phase,), random)
            await self._harm(victim, action, random)
        elif " of " in what:
            action, _, name = what.partition(" of ")
            await self._harm(self._choose(name, random), action, random)
        elif what in ("apart", "together"):
            try:
                await self.world.place(JOBS[0] if what == "together" else "")
            except MeshError as error:
                self.world.record.log_note(f"the request is lost: {error}")
        else:
            await self._disturb(what, random)

    async def _wait_for_phases(
        self, phases: tuple[str, ...], random: Random
    ) -> VirtualProcess | None:
        """Wait until a role process is in one of the phases, and a moment longer."""
        until = self._clock.monotonic() + PHASE_WAIT_S
        while self._clock.monotonic() < until:
            found = [role.process for role in self.world.live_roles if role.phase in phases]
            if found:
                await self._clock.sleep(random.uniform(0.0, 0.2))
                return random.choice(found)
            await self._clock.sleep(POLL_S)
        return None

    def _choose(self, name: str, random: Random) -> VirtualProcess | None:
        live = self.world.machine.live_processes
        found = [process for process in live if name in (process.name, process.kind)]
        return random.choice(found) if found else None

    async def _harm(self, victim: VirtualProcess | None, action: str, random: Random) -> None:
        if victim is None or victim.has_exited:
            return
        if action == "kill":
            victim.kill()
            return
        victim.stop()
        await self._clock.sleep(random.uniform(*HANG_S))
        victim.resume()

    async def _disturb(self, what: str, random: Random) -> None:
        world = self.world
        match what:
            case "redis":
                world.redis.is_unreachable = True
                await self._clock.sleep(min(random.expovariate(0.1) + 2.0, REDIS_AWAY_S[1]))
                world.redis.clear_faults()
                return
            case "disk":
                world.machine.disk.max_file_bytes = 0
            case "memory":
                world.machine.free_space = FreeSpace(memory_bytes=0, disk_bytes=1 << 40)
            case "partition":
                ends = world.network.addresses
                if len(ends) > 1:
                    world.network.partition(*random.sample(ends, 2))
            case "loss":
                world.network.faults = NetworkFaults(loss=random.uniform(0.02, 0.3))
            case "latency":
                world.network.faults = NetworkFaults(
                    latency_s=random.uniform(0.05, 0.5), jitter_s=0.3
                )
        await self._clock.sleep(random.uniform(*FULL_S))
        match what:
            case "disk":
                world.machine.disk.clear_faults()
            case "memory":
                world.machine.free_space = None
            case _:
                world.network.faults = NetworkFaults()
                world.network.heal_all()
