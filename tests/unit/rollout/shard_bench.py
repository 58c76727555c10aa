"""Shard of a job under virtual time with its engines, environments, sandbox and weight store.

Engines only count; tools and rewards are trivial.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from meshrl.common.api.sandbox import (
    OK,
    CallOutcome,
    EndSessions,
    LoadJob,
    LoadResult,
    Outcomes,
    RewardBatch,
    RewardCall,
    RunTools,
    Sandbox,
)
from meshrl.common.base.errors import StateUnavailable
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import (
    AlgorithmConfig,
    BudgetConfig,
    DatasetConfig,
    EnvironmentConfig,
    EvaluationConfig,
    JobConfig,
    RewardConfig,
    RolloutConfig,
    TrackingConfig,
)
from meshrl.common.mesh.runtime.calls.actor import Actor, call, cast
from meshrl.common.mesh.runtime.dependencies import MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.tokens.tokenizer import Tokenizer, build_character_tokenizer
from meshrl.common.state import groups, jobs, steps
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.services.engine.service import EngineService
from meshrl.services.environment.environments import Environments
from meshrl.services.rollout.runner import TrajectoryRunner
from meshrl.services.rollout.shard_job import ShardJob
from meshrl.services.weights.store import WeightStore
from meshrl.sim.engines.simulated_engine import SimulatedEngine
from meshrl.sim.redis.simulated_state import open_simulated_state_as
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests.contract.state.state_bench import JOB, TRAINER
from tests.contract.state.state_bench import Bench as StateBench
from tests.simulated_host import SimulatedChannel, SimulatedHost
from tests.unit.rollout.interrupted import Faults, FaultyMesh, FaultyState, Interruption

SLOTS, ENGINES = 4, 2
TOKENS_PER_S = 100.0
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;+-*/=()[]{}<>?!#$%&@^_"


class OneCall:
    """An environment that calls a tool after the first turn and is done after the second."""

    open_now = 0

    def open(self, row: dict[str, Any]) -> str:
        OneCall.open_now += 1
        self._turns = 0
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        self._turns += 1
        return {"tool": "cell", "input": "1"} if self._turns == 1 else {"done": True}

    def result(self, value: Any) -> dict[str, Any]:
        return {"append": "ok"}

    def cut(self, text: str) -> None:
        return None

    def close(self) -> None:
        OneCall.open_now -= 1


class TrivialSandbox(Actor):
    """Sandbox whose tools echo their input and whose rewards are 1; `sessions` has the open
    ones.
    """

    interface = Sandbox

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.sessions: set[str] = set()
        self.scores: Callable[[RewardCall], CallOutcome] = lambda c: CallOutcome(c.id, OK, 1.0, "")
        self.max_scores_per_batch = -1  # calls that `scores` answers; by default all
        self.takes_s = 0.0  # a batch of rewards
        self.scoring = 0  # batches of rewards so far

    @call(Sandbox.load_job)
    def load(self, request: LoadJob) -> LoadResult:
        return LoadResult(request.job, 1, "bwrap")

    @call(Sandbox.run_tools)
    def run(self, request: RunTools) -> Outcomes:
        self.sessions |= {c.session for c in request.calls if c.session}
        value = {"status": OK, "output": "1"}
        return Outcomes([CallOutcome(c.id, OK, value, "") for c in request.calls])

    @call(Sandbox.score_trajectories)
    async def score(self, request: RewardBatch) -> Outcomes:
        self.scoring += 1
        if self.takes_s:
            await self._clock.sleep(self.takes_s)
        outcomes = []
        for c in request.calls:
            outcomes.append(
                self.scores(c) if self.max_scores_per_batch else CallOutcome(c.id, OK, 1.0, "")
            )
            self.max_scores_per_batch -= self.max_scores_per_batch > 0
        return Outcomes(outcomes)

    @cast(Sandbox.end_sessions)
    def end_sessions(self, request: EndSessions) -> None:
        self.sessions -= set(request.sessions)


class WatchedRunner(TrajectoryRunner):
    """Runner whose trajectories may be interrupted at any await."""

    interruption = Interruption()

    async def run(self, trajectory: Any, row: dict[str, Any]) -> None:
        await self.interruption.watch(super().run(trajectory, row))


class WatchedJob(ShardJob):
    """Job whose groups and trajectories may be interrupted at any await."""

    runner: WatchedRunner

    async def _run_group(self, *which: Any) -> None:
        await self.runner.interruption.watch(super()._run_group(*which))


class ShardBench:
    def __init__(self, clock: VirtualClock, random: Random, root: Path) -> None:
        self.clock, self.random, self.root = clock, random, root
        self.network = MemoryNetwork(clock, random.child("network"))
        self.state = open_simulated_state_as(FaultyState, clock)
        self.calls, self.scripts = Faults(), Faults()
        self.state.faults = Faults()  # all processes but the shard
        self.engines: list[EngineService] = []
        self.sandbox = TrivialSandbox(clock)
        self.tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        self._write_bundle()
        config = self._config()
        await self._submit(config)
        await self._serve_weights()
        await self._serve_sandbox()
        for number in range(ENGINES):
            await self._add_engine(number)
        mesh = self._mesh(f"rollout/{JOB}/0", FaultyMesh)
        assert isinstance(mesh, FaultyMesh)
        mesh.faults = self.calls
        shard_state = FaultyState(self.state.url, self.state.client, self.state._sync_client)
        shard_state.faults = self.scripts
        await mesh.join(None)
        mesh.state = shard_state
        self.mesh = mesh
        data = JobData(JOB, config, self.root / "bundle", self.root)
        self.job = WatchedJob(mesh, data, WatchedRunner(mesh, data, self.root))
        await self.job.take_over()
        self.job.enter_lineage(0, 0)
        self.tasks.append(asyncio.create_task(self._poll_engines()))
        await self.clock.sleep(3.0)

    def _write_bundle(self) -> None:
        bundle = self.root / "bundle"
        (bundle / "modules").mkdir(parents=True)
        build_character_tokenizer(CHARACTERS, str(bundle / "tokenizer.json"))
        rows = "\n".join(json.dumps({"prompt": f"question {n}?"}) for n in range(8))
        (bundle / "train.jsonl").write_text(rows)
        (bundle / "held_out.jsonl").write_text(rows)

    def _config(self) -> JobConfig:
        return JobConfig(
            name=JOB,
            dataset=DatasetConfig(train="train.jsonl", held_out="held_out.jsonl"),
            environment=EnvironmentConfig(use="m:f", tools={"cell": "python_session"}),
            reward=RewardConfig(use="m:f"),
            algorithm=AlgorithmConfig(group_size=3, groups_per_step=2000),
            rollout=RolloutConfig(slots=SLOTS, max_tokens=200, stop=["#"]),
            evaluation=EvaluationConfig(problems=1),
            budget=BudgetConfig(steps=9),
            tracking=TrackingConfig(trace=1.0),
        )

    async def _submit(self, config: JobConfig) -> None:
        trainer = await StateBench(self.state, None).seat(TRAINER)
        document = config.to_document()
        document["bundle"] = {"dir": str(self.root / "bundle"), "digest": "0"}
        await jobs.submit(self.state, JOB, document, str(self.root), "submit")
        await steps.commit_initial(
            self.state, JOB, TRAINER, trainer, 0, steps.VersionReferences("m0", "c0")
        )
        await jobs.set_phase(self.state, JOB, jobs.Phase.TRAINING, trainer, TRAINER)

    async def _serve_weights(self) -> None:
        (self.root / "store").mkdir()
        chunks = ChunkStore(self.root / "store")
        mesh = self._mesh("weights")
        await mesh.join(WeightStore(mesh, chunks), bulk_address=chunks.local_address)

    async def _serve_sandbox(self) -> None:
        self.sandbox_mesh = self._mesh(f"sandbox/{JOB}/0")
        await self.sandbox_mesh.join(self.sandbox)

    async def leave(self) -> None:
        """Let the engines and the sandbox leave the mesh, and stop the polls."""
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()
        for service in self.engines:
            await service.mesh.leave()
        await self.sandbox_mesh.leave()

    async def join_again(self) -> None:
        """Start new processes in place of the sandbox and the engines."""
        await self._serve_sandbox()
        self.engines.clear()
        for number in range(ENGINES, 2 * ENGINES):
            await self._add_engine(number)

    async def _add_engine(self, number: int) -> None:
        engine = SimulatedEngine(
            self.clock, SLOTS, TOKENS_PER_S, lengths=(20.0, 0.8), max_length=200, version=0
        )
        mesh = self._mesh(f"engine/g{number}")
        service = EngineService(mesh, engine, lambda action: action())
        await mesh.join(service, stats=lambda: {"job": JOB, "ready": True})
        self.engines.append(service)

        async def drive() -> None:
            while True:
                service.run_once()
                await self.clock.sleep(0.1)

        self.tasks.append(asyncio.create_task(drive()))

    def _mesh(self, name: str, kind: type[Mesh] = Mesh) -> Mesh:
        async def environment(arguments: list[str], channel: SimulatedChannel) -> None:
            tokenizer = Tokenizer.load(str(self.root / "bundle" / "tokenizer.json"))
            served = Environments(OneCall, tokenizer, "prompt")
            while True:
                batch = msgpack.unpackb(await channel.recv(), raw=False)
                answers = [[key, *served.run_operation(key, op, value)] for key, op, value in batch]
                channel.send(msgpack.packb(answers, use_bin_type=True))

        programs = {"meshrl.services.environment": environment}
        return kind(
            name,
            name.partition("/")[0],
            MeshDependencies(
                self.state,
                MemoryTransport(self.network, f"mem://{name}"),
                self.clock,
                self.random.child(name),
                SimulatedHost(self.clock, self.random.child("host " + name), programs),
            ),
        )

    async def _poll_engines(self) -> None:
        while True:
            with suppress(StateUnavailable):
                await self.job.poll_engines()
            await self.clock.sleep(0.5)

    # -- actions of a test ----------------------------------------------------------------------

    async def group(self) -> asyncio.Task[None]:
        """Admit and begin another group."""
        mesh = self.mesh
        token = self.random.hex_token()
        (admitted,) = await groups.admit_groups(self.state, JOB, mesh.name, mesh.token, 1, token)
        self.job.start_group(admitted, [])
        return self.job._group_tasks[admitted.group]

    async def wait_until_idle(self) -> None:
        """Wait long enough for pending work to end."""
        await self.clock.sleep(5.0)

    def list_in_use(self) -> dict[str, Any]:
        """Return resources in use by holder; empty when no work is in flight."""
        router = self.job.runner.router
        in_use: dict[str, Any] = {
            "stays": list(router.assignments),
            "queue": router.queue_length,
            "requests": self.job.runner.group_commit._staging.open_count,
            "waits": [w for w in self.mesh.waits.list_longest([]) if w["what"] != "a hint"],
            "environments": OneCall.open_now,
            "sessions": sorted(self.sandbox.sessions),
            "missing room": ENGINES * SLOTS - router.free_requests,
            "missing engines": ENGINES - len(router.links),
        }
        for link in router.links.values():
            in_use[f"seats of {link.name}"] = len(link.assignments)
            in_use[f"turns of {link.name}"] = len(link.running_assignments)
        for service in self.engines:
            in_use[f"requests at {service.mesh.name}"] = service.engine.num_running
        return {what: amount for what, amount in in_use.items() if amount}


def run_on_shard(root: Path, story: Callable[[ShardBench], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        OneCall.open_now = 0
        bench = ShardBench(clock, random, root)
        await bench.start()
        await story(bench)

    run_virtual(main, limit_s=200_000.0)
