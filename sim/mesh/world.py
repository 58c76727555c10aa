"""A virtual mesh from its start to its end: the services, one job, and what may go wrong."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from common.random import Random
from common.runtime.patience import patiently
from common.state import jobs
from common.state.client import State
from common.wire.frames import Frame
from meshrl.launch import plan
from meshrl.launch.restoring import put_back
from sim.loop import VirtualLoop
from sim.machine import Machine
from sim.mesh.job import JOB, config_of, document_of
from sim.mesh.launcher import VirtualLauncher
from sim.mesh.programs import HOST, Surroundings
from sim.mesh.redis import VirtualRedis, state_of
from sim.network import MemoryNetwork
from sim.process import VirtualProcess
from sim.record import Record


@dataclass(frozen=True)
class Size:
    workers: int = 2
    shards: int = 1
    ranks: int = 1
    steps: int = 20


class World:
    def __init__(
        self, loop: VirtualLoop, random: Random, root: Path, record: Record, size: Size
    ) -> None:
        self.loop, self.random, self.root, self.record, self.size = loop, random, root, record, size
        self.machine = Machine(loop, random.child("machine"), record)
        self.clock = self.machine.clock
        self.network = MemoryNetwork(self.clock, random.child("network"))
        self.network.delivered = self._delivered
        self.redis = VirtualRedis(self.clock, random.child("redis"))
        self.around = Surroundings(self.machine, self.network, self.redis, root)
        self.machine.programs = self.around.programs() | {"launcher": self._launch}
        self._stop = asyncio.Event()
        self._launcher: VirtualLauncher | None = None
        self._root_process: VirtualProcess | None = None
        self._state: State | None = None

    # -- its life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the services, and submits the job."""
        process = self.machine.spawn("launcher", [], "launcher", None, tied=False)
        self._root_process = process
        self._state = state_of(self.redis, process)
        size = self.size
        config = config_of(size.workers, size.shards, size.ranks, size.steps)
        self.document = document_of(config, self.root)
        await jobs.submit(self._state, JOB, self.document, str(self.root), "submit")

    async def _launch(self, process: VirtualProcess, argv: list[str]) -> None:
        size = self.size
        services = plan.services(size.workers, size.shards, "cpu", HOST, size.ranks, sandboxes=0)
        launcher = VirtualLauncher(process, state_of(self.redis, process), services)
        self._launcher = launcher
        watching = await launcher.start()
        await self._stop.wait()
        await launcher.stop()
        watching.cancel()

    async def resume(self) -> None:
        """What `meshrl resume` does when Redis has lost the job: it goes on at a checkpoint."""
        await patiently(self.clock, self._resume)

    async def _resume(self) -> None:
        known = {row.id for row in await jobs.jobs(self.state)}
        if JOB not in known:
            self.record.say("resume the job")
            await put_back(self.state, self.root, JOB, self.document)

    async def stop(self) -> None:
        """Ends the mesh as `meshrl` does."""
        self._stop.set()
        assert self._root_process is not None
        await self._root_process.over.wait()

    @property
    def state(self) -> State:
        """A connection to Redis that nothing ends."""
        assert self._state is not None
        return self._state

    @property
    def phase(self) -> str:
        """The job's, as it lies in Redis."""
        return str(self.redis.sync_client.execute_command("HGET", f"{{{JOB}}}:job", "phase"))

    # -- what is told ----------------------------------------------------------------------------

    def _delivered(self, source: str, target: str, frames: list[Frame]) -> None:
        self.record.say(f"message {source} {target} {bytes(frames[0]).hex()}")
