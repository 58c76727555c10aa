"""Weight store and its clients under virtual time, on a real disk."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from loadtests.weights.contents import staged_whole
from meshrl.common.api.transfer.bulk_permissions import GROUPS
from meshrl.common.api.weights import STORE_NAME, Checkpoint, Weights
from meshrl.common.base.errors import NotFound
from meshrl.common.base.random import Random
from meshrl.common.job.config import BudgetConfig, JobConfig, TrainingConfig
from meshrl.common.mesh.runtime.dependencies import LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.records.checkpoints import format_checkpoint_name
from meshrl.common.state import groups, jobs, steps
from meshrl.common.state.redis.client import StateClient
from meshrl.common.weights.bulk.port import BulkClient, ChunkStore
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.common.weights.store.weight_store_client import put_chunk
from meshrl.services.weights.store import WeightStore
from meshrl.sim.redis.server import SimulatedRedisServer
from meshrl.sim.redis.simulated_state import open_state_on
from meshrl.sim.virtual_loop import VirtualClock, VirtualLoop, run_virtual
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests.simulated_host import SimulatedHost

JOB, SHARD, TRAINER = "job", "rollout/job/0", "trainer/job"
EVERY, STEPS = 4, 9


class FilesClock(VirtualClock):
    """Virtual time that starts at the current time, as the times of written files do."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(loop)
        self._start_s = time.time()

    def wall(self) -> float:
        return self._start_s + self.monotonic()


class StoreBench:
    """Processes of a mesh that write to its weight store."""

    def __init__(self, clock: FilesClock, random: Random, root: Path) -> None:
        self.clock, self.random, self.root = clock, random, root
        self.run_dir = root
        self.network = MemoryNetwork(clock, random.child("network"))
        self.chunks = ChunkStore(root / "store")
        self.host = SimulatedHost(clock, random.child("host"))

    async def open(self) -> None:
        """Start a mesh on an empty Redis."""
        self.chunks.directory.mkdir(exist_ok=True)
        self.redis = SimulatedRedisServer(self.clock)
        self.state = open_state_on(self.redis, StateClient, self.clock)
        await self._start_store()
        self.trainer, self.shard = self.mesh(TRAINER, "trainer"), self.mesh(SHARD, "rollout")
        for mesh in (self.trainer, self.shard):
            await mesh.join(None)
        self.bulk = BulkClient(self.trainer)

    async def _start_store(self) -> None:
        self.store_mesh = self.mesh(STORE_NAME, "weights")
        self.store = store = WeightStore(self.store_mesh, self.chunks)
        await self.store_mesh.join(store, bulk_address=self.chunks.local_address)
        self._sweeper = asyncio.create_task(store.run_sweeper())

    async def _stop_store(self) -> None:
        assert not self._sweeper.done(), "the sweeps have ended"
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        await self.store_mesh.leave()

    async def restart_store(self) -> None:
        """Start another process of the store on the same files."""
        await self._stop_store()
        await self._start_store()

    async def close(self) -> None:
        await self._stop_store()
        for mesh in (self.shard, self.trainer):
            await mesh.leave()

    async def lose_redis(self) -> None:
        """Stop the mesh and start it again beside its files."""
        await self.close()
        await self.open()

    def age(self, seconds: float) -> None:
        """Set the write times of all stored files back."""
        directory = self.chunks.directory
        for path in [*directory.glob("??/*"), *directory.glob(f"{GROUPS}/??/*")]:
            mtime = path.stat().st_mtime - seconds
            os.utime(path, (mtime, mtime))

    def mesh(self, name: str, kind: str) -> Mesh:
        return Mesh(
            name,
            kind,
            MeshDependencies(
                state=self.state,
                transport=MemoryTransport(self.network, f"mem://{name}#{self.random.hex_token(2)}"),
                clock=self.clock,
                random=self.random.child(name),
                host=self.host,
            ),
            settings=MeshSettings(redis_url="simulated", run_root=str(self.root), host="one"),
            terms=LeaseTerms(ttl_s=3600.0, renew_interval_s=900.0),
        )

    async def submit(self, job: str = JOB, **training: Any) -> None:
        config = JobConfig(
            name=job,
            budget=BudgetConfig(steps=STEPS),
            training=TrainingConfig(checkpoint_every=EVERY, **training),
        )
        run_dir = self.run_dir if job == JOB else self.root / job
        self.document = config.to_document()
        await jobs.submit(self.state, job, self.document, str(run_dir), f"submit {job}")

    # -- versions ---------------------------------------------------------------------------------

    async def stage(self, version: int, lineage: int = 0, job: str = JOB) -> str:
        """Stage weights that identify job, lineage and version, and return the manifest."""
        weights = {job: torch.full((8,), lineage * 1000.0 + version)}
        return await staged_whole(self.trainer, self.bulk, job, lineage, version, weights)

    async def begin(self, job: str = JOB) -> str:
        """Commit version 0 with its checkpoint and return the manifest."""
        manifest = await self.stage(0, job=job)
        name = await self.save(0, manifest, job)
        await steps.commit_initial(
            self.state, job, TRAINER, self.trainer.token, 0, steps.VersionReferences(manifest, name)
        )
        return manifest

    async def save(self, step: int, manifest: str, job: str = JOB, lineage: int = 0) -> str:
        checkpoint_state = {"version": step}
        request = Checkpoint(job, lineage, step, manifest, checkpoint_state, {})
        run_dir = self.run_dir if job == JOB else self.root / job
        directory = run_dir / "checkpoints" / format_checkpoint_name(lineage, step, manifest)
        directory.mkdir(parents=True, exist_ok=True)
        name: str = await self.trainer.ref(STORE_NAME).call(Weights.save_checkpoint, request)
        return name

    async def commit(
        self, step: int, manifest: str, checkpoint: str, lineage: int = 0, job: str = JOB
    ) -> None:
        """Commit a step that had no groups to train."""
        token = self.trainer.token
        await steps.commit_step(
            self.state,
            job,
            TRAINER,
            token,
            lineage,
            steps.StepCommit(step, [], [], steps.VersionReferences(manifest, checkpoint), {}, {}),
        )

    async def step(self, version: int, checkpoint: str) -> str:
        manifest = await self.stage(version)
        await self.commit(version, manifest, checkpoint)
        return manifest

    async def is_stored(self, manifest: str) -> bool:
        """Return whether the store has all of a version."""
        try:
            await WeightReceiver(self.trainer, self.bulk).receive(manifest)
        except NotFound:
            return False
        return True

    # -- groups -----------------------------------------------------------------------------------

    async def store_group(self) -> str:
        """Store the bytes of a group that is finished but not on record yet."""
        content = self.random.hex_token(64).encode()
        return await put_chunk(self.shard, BulkClient(self.shard), content, "it", space=GROUPS)

    async def ready(self, digest: str) -> None:
        token = self.shard.token
        await jobs.set_phase(self.state, JOB, jobs.Phase.TRAINING, self.trainer.token, TRAINER)
        [one] = await groups.admit_groups(self.state, JOB, SHARD, token, 1, "admit")
        await groups.mark_group_ready(
            self.state, JOB, SHARD, token, groups.FinishedGroup(one.group, digest, 1, 0, 1), "ready"
        )

    async def end_groups(self, step: int) -> None:
        """Commit a step that takes the ready groups, with a checkpoint that covers it."""
        manifest = await self.stage(step)
        await self.end_groups_with(step, manifest, await self.save(step, manifest))

    async def end_groups_with(self, step: int, manifest: str, checkpoint: str) -> None:
        """Commit a step on the ready groups with a staged version and its checkpoint."""
        token = self.trainer.token
        leases = await groups.lease_groups(self.state, JOB, TRAINER, token, step)
        await steps.commit_step(
            self.state,
            JOB,
            TRAINER,
            token,
            0,
            steps.StepCommit(
                step,
                [row.group for row in leases.groups],
                [],
                steps.VersionReferences(manifest, checkpoint),
                {},
                {},
                checkpointed_version=step,
            ),
        )


def on_store(root: Path, story: Callable[[StoreBench], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        bench = StoreBench(FilesClock(loop), random, root)
        await bench.open()
        await story(bench)
        await bench.close()

    run_virtual(main)
