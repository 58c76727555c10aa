"""A virtual mesh from its start to its end: the services, its jobs, and what may go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import MeshError, StateUnavailable, StorageFull
from meshrl.common.base.files.lines import LineFile
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.supervision.ended import EndReport, Reports, forget_all
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.process.supervision.supervisor import ChildEnd, ChildSpec, Hooks, Supervisor
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import events, jobs, registry
from meshrl.common.state.pool.store.store import write_settings
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.redis.client import State
from meshrl.common.state.server.rollback import JobMark
from meshrl.launch.head.restoring import put_back
from meshrl.launch.services import absolving, plan
from meshrl.launch.services.services import BUDGET, GRACE_S
from meshrl.sim.loop import VirtualClock, VirtualLoop
from meshrl.sim.machine import Machine, MachineClock, ProcessHost
from meshrl.sim.mesh.job.job import JOB, config_of, document_of, runs_of
from meshrl.sim.mesh.job.workload import PacedWorkload
from meshrl.sim.mesh.world.gate import VirtualGate
from meshrl.sim.mesh.world.programs import HOST, Surroundings
from meshrl.sim.mesh.world.redis import VirtualRedis, state_of
from meshrl.sim.network import MemoryNetwork
from meshrl.sim.process import VirtualProcess
from meshrl.sim.record import EventRecord
from meshrl.view.recording.recorded import EVENTS, event_of
from meshrl.view.recording.recorder import LOOK_S


class VirtualLauncher(Hooks):
    """Its process is never killed: with it the mesh would end, as the product's does."""

    def __init__(self, process: VirtualProcess, state: State, services: list[plan.Service]) -> None:
        self.clock: VirtualClock = process.machine.clock
        self.state, self.why = state, ""
        self._process = process
        self._specs = [
            ChildSpec(
                service.name,
                list(service.argv),
                budget=BUDGET,
                critical=True,
                stage=stage,
                own_session=True,
            )
            for stage, service in enumerate(services)
        ]
        self._supervisor = self._supervised()
        self._watch = LeaseWatch(
            state, self.clock, HOST, lambda: self._supervisor.children.values()
        )
        self._reports = Reports(state, self.clock)
        self._stopping = False

    def _supervised(self) -> Supervisor:
        return Supervisor(ProcessHost(self._process), self.clock, self._specs, hooks=self)

    async def start(self) -> asyncio.Task[None]:
        await self._supervisor.start()
        return asyncio.create_task(self._watch.run(), name="watch leases")

    async def kill_services(self) -> None:
        """At once: Redis has gone back, and what has acted on it starts anew."""
        self._stopping = True
        for child in self._supervisor.children.values():
            child.kill()
        await self._supervisor.stop(GRACE_S)

    async def start_again(self) -> None:
        self._supervisor, self._stopping = self._supervised(), False
        await self._supervisor.start()

    async def stop(self) -> None:
        self._stopping = True
        self._reports.stop()
        await self._supervisor.stop(GRACE_S)

    async def ended(self, child: Child, end: ChildEnd) -> None:
        if self._stopping or end.asked:
            return
        await self._watch.evict(child)
        await self._reports.tell(
            EndReport(child.name, end.code, end.why, end.failure, final=end.final)
        )

    async def absolved(self, spec: ChildSpec, end: ChildEnd) -> bool:
        return await absolving.absolved(self.state, self._reports, spec, end, "")

    def lease_expired(self, child: Child) -> bool:
        return self._watch.expired(child)

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        self.why = f"{spec.name} does not stay up ({why})"


BOOT_S = 3.0  # from a power cut until the mesh is started again


@dataclass(frozen=True)
class Size:
    workers: int = 2
    shards: int = 1
    ranks: int = 1
    steps: int = 20
    jobs: int = 1
    workload: PacedWorkload | None = None  # in place of the job that faults are tried on


class VirtualRecorder:
    """Writes the event stream to `events.jsonl`, as `meshrl run` does, from where an earlier one
    has stopped.
    """

    def __init__(self, state: State, clock: Clock, run_dir: Path, job: str) -> None:
        self._state, self._clock, self._job = state, clock, job
        self._file = LineFile(run_dir / EVENTS)
        known = self._file.found.rows
        self._last = event_of(known[-1]).id if known else "0"

    async def run(self) -> None:
        while True:
            await self._clock.sleep(LOOK_S)
            with suppress(StateUnavailable, StorageFull):
                new = await events.read_all(self._state, self._last)
                mine = [event for event in new if event.fields.get("job") in (None, "", self._job)]
                if mine:
                    self._file.append([asdict(event) for event in mine])
                if new:
                    self._last = new[-1].id


class World:
    def __init__(
        self, loop: VirtualLoop, random: Random, root: Path, record: EventRecord, size: Size
    ) -> None:
        self.loop, self.random, self.root, self.record, self.size = loop, random, root, record, size
        self.machine = Machine(loop, random.child("machine"), record, root)
        self.clock = self.machine.clock
        self.network = MemoryNetwork(self.clock, random.child("network"))
        self.network.delivered = lambda source, target, frames: record.say(
            f"message {source} {target} {bytes(frames[0]).hex()}"
        )
        self.redis = VirtualRedis(MachineClock(loop), random.child("redis"))
        self.around = Surroundings(self.machine, self.network, self.redis, root, size.workload)
        self.machine.programs = self.around.programs() | {"launcher": self._launch}
        self.lost: set[str] = set()  # files that power cuts took, or a part of them
        self.runs = runs_of(root, size.jobs)
        self.documents: dict[str, dict[str, Any]] = {}
        self.refused = ""  # why a `meshrl resume` gave up
        self._stop = asyncio.Event()
        self._root_process: VirtualProcess | None = None
        self._state: State | None = None

    # -- its life --------------------------------------------------------------------------------

    async def start(self) -> None:
        process = self.machine.spawn("launcher", [], "launcher", None, tied=False)
        self._root_process = process
        self._state = state_of(self.redis, process)
        size = self.size
        shape = size.workers, size.shards, size.ranks, size.steps
        for seed, (name, run_dir) in enumerate(self.runs.items()):
            run_dir.mkdir(parents=True, exist_ok=True)
            if run_dir != self.root:
                (run_dir / "store").symlink_to(self.root / "store")
            workload = size.workload
            config = workload.config(name, seed) if workload else config_of(*shape, name, seed)
            document = document_of(config, run_dir, workload)
            self.documents[name] = document
            await jobs.submit(self._state, name, document, str(run_dir), f"submit {name}")

    async def _launch(self, process: VirtualProcess, argv: list[str]) -> None:
        size = self.size
        services = plan.services(size.workers, "cpu", HOST)
        state = state_of(self.redis, process)
        owner = state_of(self.redis, process, owner=True)
        gate = VirtualGate(self.redis, owner, self.root, self.runs)
        launcher = VirtualLauncher(process, state, services)
        if not await self._tried(lambda: self._begin(gate, state, again=bool(argv))):
            return
        watching = await launcher.start()
        recording = [
            asyncio.create_task(
                VirtualRecorder(state, self.clock, run_dir, job).run(), name=f"record {job}"
            )
            for job, run_dir in self.runs.items()
        ]
        guarding = asyncio.create_task(self._guard(gate, launcher, state), name="guard redis")
        await self._stop.wait()
        guarding.cancel()
        await launcher.stop()
        watching.cancel()
        for task in recording:
            task.cancel()

    async def _begin(self, gate: VirtualGate, state: State, again: bool) -> None:
        """What a mesh does before its services start."""
        await gate.admit()
        await write_settings(state, PoolSettings())
        if not again:
            return
        for entry in await registry.entries(state):  # whose processes are no more
            if entry.alive:
                await registry.evict(state, entry.name, entry.incarnation)
        await forget_all(state)
        await self._put_back(gate, state)

    async def _put_back(self, gate: VirtualGate, state: State) -> None:
        """A job goes on at a checkpoint when Redis does not have it."""
        await write_settings(state, PoolSettings())
        there = {row.id for row in await jobs.jobs(state)}
        for job, run_dir in self.runs.items():
            if job not in there:
                self.record.say(f"put {job} back")
                seen = gate.known.jobs.get(job, JobMark())
                await put_back(state, run_dir, job, self.documents[job], seen)
        await gate.returned()

    async def _guard(self, gate: VirtualGate, launcher: VirtualLauncher, state: State) -> None:
        """What a launcher does when Redis is not what it was."""
        async for why in gate.went_back():
            self.record.say(f"redis went back: {why}")
            await launcher.kill_services()
            await gate.begin_anew(why)
            if await self._tried(lambda: self._put_back(gate, state)):
                await launcher.start_again()

    async def _tried(self, what: Callable[[], Awaitable[None]]) -> bool:
        """Does what a command line does; False when that has given up, and says why."""
        try:
            await patiently(self.clock, what)
        except MeshError as error:
            self.refused = str(error)
        except Exception as error:  # it would print a traceback
            self.refused = f"{type(error).__name__}: {error}"
            self.machine.failures.append(f"meshrl resume: {self.refused}")
        return not self.refused

    # -- the power goes --------------------------------------------------------------------------

    async def power_cut(self, random: Random, held: Any) -> None:
        """Every process ends at once, and the mesh is started again on what the disk has. Redis
        comes back with `held`, a copy of its server. Nothing happens while the mesh is off: what
        tells that Redis has lost something must not be lost before it is looked at.
        """
        if not self.on:
            return
        self.record.say("the power goes")
        self._kill_all()
        self.lost |= self.machine.disk.cut(random)
        await self._come_back(held)

    async def redis_lost(self, held: Any) -> None:
        """Every process ends, and the mesh is started again on its files as they are, and a Redis
        with `held`: an older copy, or None, where it cannot load its file.
        """
        self.record.say("redis has lost something")
        self._kill_all()
        await self._come_back(held)

    def _kill_all(self) -> None:
        for process in self.machine.alive:
            process.kill()

    async def _come_back(self, held: Any) -> None:
        self.redis.restart(held)
        await self.clock.sleep(BOOT_S)
        self.switch_on()

    @property
    def on(self) -> bool:
        assert self._root_process is not None
        return not self._root_process.ended

    def switch_on(self) -> None:
        """Starts the mesh again if it was cut off."""
        if not self.on and not self.refused:
            self.record.say("the power comes")
            argv = ["resume"]
            self._root_process = self.machine.spawn("launcher", argv, "launcher", None, tied=False)

    async def stop(self) -> None:
        self._stop.set()
        assert self._root_process is not None
        await self._root_process.over.wait()

    @property
    def state(self) -> State:
        assert self._state is not None
        return self._state

    @property
    def over(self) -> bool:
        """Whether all jobs have ended, or will not go on."""
        phases = map(self.phase_of, self.runs)
        return bool(self.refused) or all(phase in ("finished", "failed") for phase in phases)

    @property
    def phase(self) -> str:
        return self.phase_of(JOB)

    def phase_of(self, job: str) -> str:
        return str(self.redis.sync_client.execute_command("HGET", f"{{{job}}}:job", "phase"))

    def beside(self, name: str) -> Path:
        """A directory of the simulation's own, which is no part of the run's."""
        return self.root.with_name(f"{self.root.name}.{name}")
