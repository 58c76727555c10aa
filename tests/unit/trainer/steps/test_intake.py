"""Intake of a step's groups from a real weight store: rejected groups are replaced."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from meshrl.common.api.transfer.bulk_permissions import GROUPS
from meshrl.common.api.weights import STORE_NAME, TrajectoryGroup
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.encoding.blob import pack
from meshrl.common.base.random import Random
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.state import events, groups, jobs, steps
from meshrl.common.state.job_lifecycle import trajectory_accounting
from meshrl.common.state.redis.client import StateClient
from meshrl.common.weights.bulk.authenticators import InProcessAuthenticator
from meshrl.common.weights.bulk.port import BulkClient, BulkServer, ChunkStore
from meshrl.common.weights.store.weight_store_client import put_chunk
from meshrl.services.rollout.record.finished_groups import submit_group
from meshrl.services.trainer.steps.batch import RefillPolicy, compute_staleness
from meshrl.services.trainer.steps.group_intake import GroupIntake
from meshrl.services.weights.store import WeightStore
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.load import scaled
from tests.meshes import alone, on_sockets
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.common.base.files.harms import flip
from tests.unit.trainer.steps.groups_under_test import group, job

JOB, SHARD = "job", "rollout/job/0"
CONFIG = job("dapo", groups_per_step=2, group_size=2)


class IntakeBench:
    """Trainer's intake with a shard that finishes the requested groups."""

    def __init__(self, mesh: Mesh, rolling: Mesh) -> None:
        self.mesh, self.rolling, self.shard = mesh, rolling, rolling.token
        self.bulk = BulkClient(mesh)
        self.intake = GroupIntake(mesh, self.bulk, JOB)

    async def finish_group(self, made: TrajectoryGroup) -> int:
        """Open a group, finish it as a shard does, and return its id."""
        (one,) = await groups.admit_groups(self.mesh.state, JOB, SHARD, self.shard, 1, _operation())
        await submit_group(self.rolling, self.bulk, JOB, replace(made, group=one.group))
        return one.group

    async def finish(self, *rewards: list[float], garbled: bool = False) -> list[int]:
        """Open and finish a group for each list of rewards, and return their ids."""
        state = self.mesh.state
        opened = await groups.admit_groups(
            state, JOB, SHARD, self.shard, len(rewards), _operation()
        )
        assert len(opened) == len(rewards)
        for one, worth in zip(opened, rewards, strict=True):
            content = pack(group(worth, number=one.group, version=0))
            content = content[::-1] if garbled else content
            digest = await put_chunk(self.mesh, self.bulk, content, "group", space=GROUPS)
            await groups.mark_group_ready(
                state,
                JOB,
                SHARD,
                self.shard,
                groups.FinishedGroup(one.group, digest, 1, 0, 2),
                _operation(),
            )
        return [one.group for one in opened]

    async def take_groups(self, refill: RefillPolicy, *stale_ones: int) -> list[TrajectoryGroup]:
        def stale(group: TrajectoryGroup) -> bool:
            lag = compute_staleness(group, 0)
            return lag > CONFIG.algorithm.max_staleness or group.group in stale_ones

        found = self.intake.stream_groups(1, stale, refill.try_replace)
        return [group async for group in found]

    async def assert_replaces(self, good: int, *stale: int, counted: str = "host_lost") -> None:
        """Assert that a step takes group `good`, and a new one for a group counted as `counted`."""
        step_groups = asyncio.ensure_future(self.take_groups(RefillPolicy(CONFIG), *stale))
        async with asyncio.timeout(scaled(20)):
            while not (await self.count_in_flight())[counted]:
                assert not step_groups.done()
                await asyncio.sleep(0.01)
            (another,) = await self.finish([0.0, 1.0])
            assert [one.group for one in await step_groups] == [good, another]
        assert (await self.count_in_flight())["lost"] == 0

    async def count_in_flight(self) -> dict[str, int]:
        state = self.mesh.state
        in_flight = (await groups.count_in_flight(state, JOB)).samples
        return trajectory_accounting.compute_account(await events.read_all(state), in_flight)


def _operation() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[IntakeBench]:
    clock, host = SystemClock(), SystemHost()
    state = open_simulated_state(clock)

    def mesh(name: str, where: str) -> Mesh:
        settings = MeshSettings(redis_url=state.url, run_root=str(tmp_path), host=where)
        return on_sockets(name, state, clock, host=host, settings=settings)

    (tmp_path / "store").mkdir()
    chunks = ChunkStore(tmp_path / "store")
    serving, waiting_intake = mesh(STORE_NAME, "there"), mesh("trainer/job", "here")
    authenticator = InProcessAuthenticator()
    bulk = BulkServer(chunks, host, "tcp://127.0.0.1:*", authenticator=authenticator)
    await serving.join(WeightStore(serving, chunks), bulk_address=bulk.address)
    await waiting_intake.join(None)
    rolling = mesh(SHARD, "here")
    await rolling.join(None)
    await _training(state, CONFIG, waiting_intake)
    yield IntakeBench(waiting_intake, rolling)
    await rolling.leave()
    await waiting_intake.leave()
    await serving.leave()
    bulk.close()
    await state.close()


async def _training(state: StateClient, config: JobConfig, trainer: Mesh) -> None:
    await jobs.submit(state, JOB, config.to_document(), "/runs/job", _operation())
    await steps.commit_initial(
        state, JOB, trainer.name, trainer.token, 0, steps.VersionReferences("m0", "c0")
    )
    await jobs.set_phase(state, JOB, jobs.Phase.TRAINING, trainer.token, trainer.name)


async def test_groups_without_signal_are_replaced_until_the_step_is_full(
    bench: IntakeBench,
) -> None:
    silent, reporting = await bench.finish([1.0, 1.0], [1.0, 0.0])
    refill = RefillPolicy(CONFIG)
    step_groups = asyncio.ensure_future(bench.take_groups(refill))
    async with asyncio.timeout(scaled(20)):
        while refill.replaced_count < 1 or not (await bench.count_in_flight())["filtered"]:
            await asyncio.sleep(0.01)
        assert not step_groups.done()
        (another,) = await bench.finish([0.0, 0.0])
        while refill.replaced_count < 2 or (await bench.count_in_flight())["filtered"] < 4:
            await asyncio.sleep(0.01)
        (last,) = await bench.finish([0.0, 1.0])
        assert [one.group for one in await step_groups] == [reporting, last]
    count_in_flight = await bench.count_in_flight()
    assert (count_in_flight["filtered"], count_in_flight["in_flight"], count_in_flight["lost"]) == (
        4,
        4,
        0,
    )
    assert {silent, another}.isdisjoint({reporting, last})


async def test_step_accepts_groups_without_signal_without_dynamic_sampling(
    bench: IntakeBench,
) -> None:
    finished = await bench.finish([1.0, 1.0], [1.0, 0.0])
    refill = RefillPolicy(job("grpo", groups_per_step=2, group_size=2))
    async with asyncio.timeout(scaled(20)):
        assert [one.group for one in await bench.take_groups(refill)] == finished
    assert refill.replaced_count == 0


async def test_unreadable_group_is_requeued_and_replaced(
    bench: IntakeBench,
) -> None:
    await bench.finish([1.0, 0.0], garbled=True)
    (good,) = await bench.finish([1.0, 0.0])
    await bench.assert_replaces(good)


async def test_group_with_mismatched_arrays_is_requeued(bench: IntakeBench) -> None:
    made = group([1.0, 0.0], version=0, reference=True)
    await bench.finish_group(replace(made, reference_logprobs=made.reference_logprobs[:-1]))
    (good,) = await bench.finish([1.0, 0.0])
    await bench.assert_replaces(good)


async def test_tokens_staler_than_recorded_are_requeued_as_stale(bench: IntakeBench) -> None:
    stale, good = await bench.finish([1.0, 0.0], [1.0, 0.0])
    await bench.assert_replaces(good, stale, counted="stale_requeued")
    count_in_flight = await bench.count_in_flight()
    assert (count_in_flight["stale_requeued"], count_in_flight["host_lost"]) == (2, 0)


async def test_group_in_a_corrupt_file_is_requeued(bench: IntakeBench, tmp_path: Path) -> None:
    ids = await bench.finish([1.0, 0.0], [1.0, 0.0])
    leased = await groups.lease_groups(bench.mesh.state, JOB, bench.mesh.name, bench.mesh.token, 1)
    path = ChunkStore(tmp_path / "store").open_space(GROUPS).chunk_path(leased.groups[0].digest)
    flip(path, b"")
    await bench.assert_replaces(ids[1])
    found = await events.read_all(bench.mesh.state)
    [corruption] = [event.fields for event in found if event.kind == "damaged"]
    assert (corruption["what"], corruption["job"], corruption["path"]) == ("group", JOB, str(path))
    quarantined_path = tmp_path / "store" / "quarantine" / GROUPS / path.parent.name / path.name
    assert corruption["aside"] == str(quarantined_path)


async def test_failed_member_does_not_make_its_group_stale(bench: IntakeBench) -> None:
    made = group([1.0, np.nan, 0.0], version=3)
    made.versions[6:13] = [-1, -1, 0, 0, 0, 0, 0]
    failed = group([np.nan, np.nan], version=2)
    ids = [await bench.finish_group(made), await bench.finish_group(failed)]
    mesh = bench.mesh
    leased = await groups.lease_groups(mesh.state, JOB, mesh.name, mesh.token, 1, ())
    rows = {row.group: row for row in leased.groups}
    assert [rows[i].min_version for i in ids] == [3, 2]


@pytest.mark.parametrize("still", ["asleep", "paused"])
@story_on(partial(run_virtual, limit_s=1e5), given=2)
async def test_wait_for_groups_restarts_after_sleep_or_pause(
    clock: VirtualClock, random: Random, still: str
) -> None:
    mesh = alone("trainer/job", clock, random, SimulatedHost(clock, random.child("host")))
    await mesh.join(None)
    await _training(mesh.state, CONFIG, mesh)
    intake = GroupIntake(mesh, BulkClient(mesh), JOB)
    step_groups = asyncio.ensure_future(anext(intake.stream_groups(1, lambda group: False)))

    def set_still(is_still: bool) -> None:
        if still == "paused":
            mesh.job_clock.set_paused(is_still)
        elif is_still:
            intake.is_awake.clear()
        else:
            intake.is_awake.set()

    def measure_waits() -> list[float]:
        waits = mesh.waits.list_longest([])
        assert all(wait["what"] == "ready groups" for wait in waits)
        return [clock.wall() - wait["since_ms"] / 1000 for wait in waits]

    await clock.sleep(30.0)
    assert measure_waits() == [pytest.approx(30.0, abs=0.1)]
    set_still(True)
    await clock.sleep(300.0)
    assert measure_waits() == []
    set_still(False)
    await clock.sleep(5.0)
    assert measure_waits() == [pytest.approx(5.0, abs=0.1)]
    step_groups.cancel()
    await asyncio.gather(step_groups, return_exceptions=True)
