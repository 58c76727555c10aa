"""A whole mesh in one process under virtual time: planners, rollout, weights, and stand-ins for
what needs a GPU.

Planner, rollout shard, weight store and engine actors are the product's own, over the in-memory
network and `sim.state`; engines generate at a set rate without computing, the trainer takes a
set time a step and changes one number.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from common.job.config import AlgorithmConfig, BudgetConfig, JobConfig, PlannerConfig, RolloutConfig
from common.model.tokenizer import Tokenizer, character_tokenizer
from common.model.transfer import stage
from common.random import Random
from common.runtime.actor import Actor
from common.runtime.mesh import Mesh, MeshSettings
from common.state import gangs, groups, jobs, steps
from common.wire.bulk import BulkClient, ChunkStore
from services.engine.running import follow
from services.engine.service import EngineService
from services.engine.simulated import SimulatedEngine
from services.environment.environments import Environments
from services.planner.planner import Planner
from services.rollout.shard import RolloutShard
from services.weights.store import WeightStore
from sim.host import SimulatedChannel, SimulatedHost
from sim.loop import VirtualClock
from sim.network import MemoryNetwork, MemoryTransport
from sim.state import simulated_state

JOB = "simulated"
TOKENS_PER_S = 40.0
SLOTS = 8
FLUSH_S = 0.8  # seconds between flushes of a simulated engine: 32 tokens of each request
TRAIN_S = 24.0  # seconds that a step takes on one gang
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;+-*/=()[]{}<>?!#$%&@^_"


class StoppableHost(SimulatedHost):
    """A host whose threads stop when the process is stopped."""

    def __init__(self, clock: VirtualClock, random: Random, tokenizer: Path) -> None:
        async def environment(arguments: list[str], channel: SimulatedChannel) -> None:
            import msgpack

            served = Environments(None, Tokenizer.load(str(tokenizer)), "prompt")
            while True:
                batch = msgpack.unpackb(await channel.recv(), raw=False)
                answers = [[key, *served.perform(key, op, value)] for key, op, value in batch]
                channel.send(msgpack.packb(answers, use_bin_type=True))

        super().__init__(clock, random, {"services.environment": environment})
        self.ticks: list[Any] = []

    def every(self, interval_s: float, fn: Callable[[], bool | None], name: str) -> Any:
        tick = super().every(interval_s, fn, name)
        self.ticks.append(tick)
        return tick


class Process:
    """A mesh member with its own mesh object; `stop` is SIGSTOP for good: nothing is given back."""

    def __init__(self, world: World, name: str, kind: str) -> None:
        self.name = name
        self.network = world.network
        self.host = StoppableHost(world.clock, world.random.child(name), world.tokenizer)
        self.mesh = Mesh(
            name=name,
            kind=kind,
            state=world.state,
            transport=MemoryTransport(world.network, f"mem://{name}#{world.random.token(2)}"),
            clock=world.clock,
            random=world.random.child("mesh " + name),
            host=self.host,
            settings=MeshSettings(redis_url="simulated", run_root=str(world.root), host="one"),
        )
        self.actor = Actor()
        self.tasks: list[asyncio.Task[Any]] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        self.tasks.append(asyncio.create_task(work, name=self.name))

    async def join(self, actor: Actor, stats: Callable[[], dict[str, Any]], bulk: str = "") -> None:
        self.actor = actor
        await self.mesh.join(actor, stats=stats, bulk_address=bulk)

    def stop(self) -> None:
        self.network.pause(self.mesh.transport.address)
        for tick in self.host.ticks:
            tick.stop()
        for task in self.tasks:
            task.cancel()

    def check(self) -> None:
        """Raises what one of its tasks raised."""
        for task in self.tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


class World:
    """All processes of a simulated mesh."""

    def __init__(self, clock: VirtualClock, random: Random, root: Path) -> None:
        self.clock, self.random, self.root = clock, random, root
        self.network = MemoryNetwork(clock, random.child("network"))
        self.state = simulated_state(clock)
        self.tokenizer = root / "bundle" / "tokenizer.json"
        self.processes: list[Process] = []
        self.steps = 0

    async def start(self, workers: int, shards: int = 1, steps: int = 1_000_000) -> None:
        await self._submit(workers, steps)
        for name in ("planner/0", "planner/1"):
            process = self._process(name, "planner")
            planner = Planner(process.mesh)
            await process.join(planner, planner.stats)
            process.run(planner.serve())
        process = self._process("weights", "weights")
        (self.root / "store").mkdir()
        chunks = ChunkStore(self.root / "store")
        store = WeightStore(process.mesh, chunks)
        await process.join(store, store.stats, bulk=chunks.local_address)
        process.run(store.sweep_forever())
        for name in (f"rollout/{number}" for number in range(shards)):
            process = self._process(name, "rollout")
            shard = RolloutShard(process.mesh, self.root)
            await process.join(shard, shard.stats)
            process.run(shard.serve())
        for number in range(workers):
            process = self._process(f"worker/g{number}", "worker")
            await process.join(Actor(), dict)
            process.run(self._work(process, f"g{number}"))

    def _process(self, name: str, kind: str) -> Process:
        process = Process(self, name, kind)
        self.processes.append(process)
        return process

    async def _submit(self, workers: int, steps: int) -> None:
        bundle = self.root / "bundle"
        (bundle / "modules").mkdir(parents=True)
        character_tokenizer(CHARACTERS, str(self.tokenizer))
        rows = [json.dumps({"prompt": f"question {n}?"}) for n in range(64)]
        (bundle / "train.jsonl").write_text("\n".join(rows))
        config = JobConfig(
            name=JOB,
            algorithm=AlgorithmConfig(group_size=4, groups_per_step=4, max_staleness=2),
            rollout=RolloutConfig(slots=SLOTS, max_tokens=400),
            budget=BudgetConfig(steps=steps),
            planner=PlannerConfig(),
        )
        document = config.document()
        document["dataset"]["train"] = "train.jsonl"
        document["mesh"]["workers"] = workers
        document["bundle"] = {"dir": str(bundle), "digest": "0"}
        await jobs.submit(self.state, JOB, document, str(self.root), "submit")

    # -- what a worker does ----------------------------------------------------------------------

    async def _work(self, process: Process, gang: str) -> None:
        """Starts and stops the role process that the gang's record asks for."""
        mesh, epoch = process.mesh, -1
        role: Process | None = None
        await gangs.join_gang(self.state, gang, mesh.name, mesh.token, "simulated")
        while True:
            await self.clock.sleep(2.0)
            row = await gangs.gang(self.state, gang)
            if row is None or row.epoch == epoch:
                continue
            epoch = row.epoch
            if role is not None:
                role.stop()
                await role.mesh.leave()
                role = None
            if row.desired_role == gangs.Role.ROLLOUT:
                role = await self._engine(gang, epoch)
            elif row.desired_role == gangs.Role.TRAINING:
                role = await self._trainer(gang, epoch, row.desired_core)
            status = "idle" if row.desired_role == gangs.Role.IDLE else "ready"
            await gangs.report_actual(self.state, gang, mesh.token, epoch, row.desired_role, status)

    async def _engine(self, gang: str, epoch: int) -> Process:
        process = self._process(f"engine/{gang}", "engine")
        engine = SimulatedEngine(self.clock, SLOTS, TOKENS_PER_S, max_length=400, version=-1)
        service = EngineService(process.mesh, engine, SLOTS, lambda action: action())

        async def drive() -> None:
            while True:
                service.turn()
                await self.clock.sleep(FLUSH_S)

        def stats() -> dict[str, Any]:
            return {
                "job": JOB,
                "gang": gang,
                "epoch": epoch,
                "ready": True,
                "requests": service.requests,
                "tokens": engine.tokens_generated,
                "occupied_s": service.occupied_s,
                "version": engine.version,
            }

        await process.join(service, stats)
        process.run(drive())
        process.run(follow(process.mesh, service, JOB, look_s=2.0))
        return process

    async def _trainer(self, gang: str, epoch: int, core: bool) -> Process:
        kind, name = ("trainer", f"trainer/{JOB}") if core else ("hybrid", f"hybrid/{gang}")
        process = self._process(name, kind)
        busy = {"s": 0.0}

        def stats() -> dict[str, Any]:
            common = {"job": JOB, "gang": gang, "epoch": epoch, "ready": True}
            return common | {"step": self.steps, "bins": self.steps, "busy_s": busy["s"]}

        await process.join(Actor(), stats)
        if core:
            process.run(self._train(process.mesh, busy))
        return process

    async def _train(self, mesh: Mesh, busy: dict[str, float]) -> None:
        """Steps that take as long as the gangs in training make them take."""
        bulk = BulkClient(mesh)
        row = await jobs.job(self.state, JOB)
        assert row is not None
        if row.version < 0:
            first = await stage(mesh, bulk, JOB, 0, 0, {"w": torch.zeros(1)})
            await steps.commit_initial(self.state, JOB, mesh.name, mesh.token, 0, first, "c0")
            await jobs.set_phase(self.state, JOB, jobs.Phase.TRAINING, mesh.token, mesh.name)
        while True:
            row = await jobs.job(self.state, JOB)
            assert row is not None
            step = row.version + 1
            leased = await groups.lease_groups(self.state, JOB, mesh.name, mesh.token, step)
            if leased.waiting is not None:
                await self.clock.sleep(0.5)
                continue
            training = sum(
                g.desired_role == gangs.Role.TRAINING and g.settled
                for g in await gangs.gangs(self.state)
            )
            began = self.clock.monotonic()
            await self.clock.sleep(TRAIN_S / max(1, training))
            made = await stage(mesh, bulk, JOB, 0, step, {"w": torch.full((1,), float(step))})
            await steps.commit_step(
                self.state,
                JOB,
                mesh.name,
                mesh.token,
                0,
                step,
                [g.group for g in leased.groups],
                [],
                made,
                f"c{step}",
                {"step": step},
                {},
                covered=step,
            )
            busy["s"] += self.clock.monotonic() - began
            self.steps = step
