"""Training core and the worker that owns its segments, on their own network."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from meshrl.common.api.calls.interface import Interface
from meshrl.common.api.calls.role import SetTier, TierUsage
from meshrl.common.api.node import AcquireSlice, ReleaseSlice, TimeSlice, Worker
from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.clock import Clock
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import AlgorithmConfig, JobConfig, LoraConfig, TrainedModelConfig
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.dependencies import MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.redis.client import StateClient
from meshrl.services.node.instances.segments import MemorySegments, SegmentCallsMixin
from meshrl.services.trainer.core.core import TrainerCore
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.initialization.initial_weights import add_adapters, create_learner
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests.simulated_host import SimulatedHost
from tests.tokenizers import make_tokenizer
from tests.unit.trainer.steps.groups_under_test import group, job

DIGITS = Path(__file__).parents[3] / "mesh/jobs/digits.toml"
MODEL = tomllib.loads(DIGITS.read_text())["model"]["config"]
WORKER = "worker/w0"


class SegmentCalls(Interface):
    """Part of a worker's interface that handles segments and time slices."""


SegmentCalls.methods = {
    name: method for name, method in Worker.methods.items() if name.endswith(("_segment", "_slice"))
}


class SegmentWorker(SegmentCallsMixin):
    interface = SegmentCalls

    def __init__(self, segments: MemorySegments, mesh: Mesh) -> None:
        self.segments, self._mesh = segments, mesh
        # prepares the requested kinds before a time slice is granted
        self.prepare: Callable[[AcquireSlice], Awaitable[None]] | None = None

    async def is_process(self, name: str, incarnation: str, owner: str | bytes) -> bool:
        return True

    @call(Worker.acquire_slice)
    async def acquire_slice(self, request: AcquireSlice) -> TimeSlice:
        assert self.prepare is not None
        await self.prepare(request)
        return TimeSlice(request.ticket, 60.0, 0.0)

    @call(Worker.release_slice)
    def release_slice(self, request: ReleaseSlice) -> None:
        pass


def make_config(variant: str) -> JobConfig:
    config = replace(job("grpo"), model=TrainedModelConfig(config=MODEL))
    if variant == "critic":
        return replace(config, algorithm=AlgorithmConfig(name="ppo"))
    if variant == "adapters":
        return replace(config, lora=LoraConfig(rank=2))
    if variant == "bfloat16":
        return replace(config, training=replace(config.training, dtype="bfloat16"))
    return config


class Bench:
    """Training core on its own network; `budget` is the worker's bytes for segments."""

    def __init__(
        self,
        clock: Clock,
        random: Random,
        directory: Path,
        variant: str = "plain",
        budget: int = 0,
    ) -> None:
        self.clock, self.random, self.directory = clock, random, directory
        self.config = make_config(variant)
        make_tokenizer(directory)
        self.network = MemoryNetwork(clock, random.child("network"))
        self.state: StateClient = open_simulated_state(clock)
        self.segments = MemorySegments(lambda: 1 << 40, budget, WORKER)
        self.starts, self.epoch = 0, 0
        self.core = self.start_core()

    def mesh(self, name: str) -> Mesh:
        self.starts += 1
        return Mesh(
            name,
            name.partition("/")[0],
            MeshDependencies(
                state=self.state,
                transport=MemoryTransport(self.network, f"mem://{name}/{self.starts}"),
                clock=self.clock,
                random=self.random.child(f"{name} {self.starts}"),
                host=SimulatedHost(self.clock, self.random.child("host " + name)),
            ),
        )

    def start_core(self) -> TrainerCore:
        """Start a process of the core, as at the beginning of the job."""
        data = JobData("j", self.config, self.directory, self.directory)
        learner = create_learner(data)
        add_adapters(data, learner)
        seat = Placement("g0", "g0.0", "j", 1, core=True)
        mesh = self.mesh("trainer/j")
        core = TrainerCore(mesh, data, seat, GangCompute(mesh, "j", Rank.for_single_rank(learner)))
        core.kinds.set_targets(WORKER, str(self.directory))
        core.is_ready = core.position.is_complete = True
        return core

    @property
    def learner(self) -> Learner:
        """Return the learner of the core."""
        learner = self.core.compute.local_learner
        assert learner is not None
        return learner

    async def __aenter__(self) -> Bench:
        self.worker = self.mesh(WORKER)
        self.segment_worker = SegmentWorker(self.segments, self.worker)
        await self.worker.join(self.segment_worker)
        await self.core.mesh.join(None)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.core.tiers.stop()
        async with self.segments:
            await self.core.mesh.leave()
            await self.worker.leave()

    def share(self, prepare: Callable[[AcquireSlice], Awaitable[None]]) -> None:
        """Let the core compute in time slices, each of which `prepare` precedes."""
        self.segment_worker.prepare = prepare
        self.core.runner.time_slices = SliceClient(self.core.mesh, WORKER, "g0.0", 1, enabled=True)

    async def set_tier(self, tier: str) -> TierUsage:
        self.epoch += 1
        return await self.core.tiers.set_tier(self.desired_tier(tier, self.epoch))

    def desired_tier(self, tier: str, epoch: int) -> SetTier:
        return SetTier(
            tier, epoch, time_sliced=False, segment_owner=WORKER, offload_dir=str(self.directory)
        )

    async def step(self, number: int, between: Callable[[], Awaitable[Any]] | None = None) -> None:
        """Run one step of the core and call `between` after each group and each piece."""

        async def arrive() -> AsyncIterator[TrajectoryGroup]:
            for one in range(3):
                if between is not None:
                    await between()
                yield group([1.0, 0.0, 0.5], number=one, version=0, seed=10 * number + one)

        stepping = self.core._make_step(number, "", self.core.data.config).run(arrive())
        task = asyncio.create_task(stepping)
        while between is not None and not task.done():
            await between()
            await asyncio.sleep(0)  # until its next piece
        await task
        self.core.position.version = number

    def digest(self) -> str:
        """Return a digest of all state that the next step depends on."""
        learner = self.learner
        digest_state = xxhash.xxh3_128(repr(sorted(learner.get_counts().items())).encode())
        tensors: dict[str, Tensor] = learner.get_tensors() | learner.get_derived_tensors()
        for name, tensor in tensors.items():
            digest_state.update(name.encode())
            copied = tensor.detach().clone().view(-1).view(torch.uint8)
            digest_state.update(copied.numpy().tobytes())
        return digest_state.hexdigest()
