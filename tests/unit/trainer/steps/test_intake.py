"""Groups of a step from a real weight store: what may not train gives its place to another."""

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


class Rollout:
    """Trainer's intake, with a shard that finishes the requested groups."""

    def __init__(self, mesh: Mesh, rolling: Mesh) -> None:
        self.mesh, self.rolling, self.shard = mesh, rolling, rolling.token
        self.bulk = BulkClient(mesh)
        self.intake = GroupIntake(mesh, self.bulk, JOB)

    async def hand_in(self, made: TrajectoryGroup) -> int:
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

    async def taken(self, refill: RefillPolicy, *stale_ones: int) -> list[TrajectoryGroup]:
        def stale(group: TrajectoryGroup) -> bool:
            lag = compute_staleness(group, 0)
            return lag > CONFIG.algorithm.max_staleness or group.group in stale_ones

        found = self.intake.stream_groups(1, stale, refill.try_replace)
        return [group async for group in found]

    async def replaces(self, good: int, *stale: int, counted: str = "host_lost") -> None:
        """Assert that a step takes group `good`, and a new one for a group counted as `counted`."""
        taking = asyncio.ensure_future(self.taken(RefillPolicy(CONFIG), *stale))
        async with asyncio.timeout(scaled(20)):
            while not (await self.account())[counted]:
                assert not taking.done()
                await asyncio.sleep(0.01)
            (another,) = await self.finish([0.0, 1.0])
            assert [one.group for one in await taking] == [good, another]
        assert (await self.account())["lost"] == 0

    async def account(self) -> dict[str, int]:
        state = self.mesh.state
        in_flight = (await groups.count_in_flight(state, JOB)).samples
        return trajectory_accounting.compute_account(await events.read_all(state), in_flight)


def _operation() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def rollout(tmp_path: Path) -> AsyncIterator[Rollout]:
    clock, host = SystemClock(), SystemHost()
    state = open_simulated_state(clock)

    def mesh(name: str, where: str) -> Mesh:
        settings = MeshSettings(redis_url=state.url, run_root=str(tmp_path), host=where)
        return on_sockets(name, state, clock, host=host, settings=settings)

    (tmp_path / "store").mkdir()
    chunks = ChunkStore(tmp_path / "store")
    serving, asking = mesh(STORE_NAME, "there"), mesh("trainer/job", "here")
    door = InProcessAuthenticator()
    bulk = BulkServer(chunks, host, "tcp://127.0.0.1:*", authenticator=door)
    await serving.join(WeightStore(serving, chunks), bulk_address=bulk.address)
    await asking.join(None)
    rolling = mesh(SHARD, "here")
    await rolling.join(None)
    await _training(state, CONFIG, asking)
    yield Rollout(asking, rolling)
    await rolling.leave()
    await asking.leave()
    await serving.leave()
    bulk.close()
    await state.close()


async def _training(state: StateClient, config: JobConfig, trainer: Mesh) -> None:
    await jobs.submit(state, JOB, config.to_document(), "/runs/job", _operation())
    await steps.commit_initial(
        state, JOB, trainer.name, trainer.token, 0, steps.VersionReferences("m0", "c0")
    )
    await jobs.set_phase(state, JOB, jobs.Phase.TRAINING, trainer.token, trainer.name)


async def test_groups_without_signal_are_replaced_until_the_step_is_full(rollout: Rollout) -> None:
    silent, telling = await rollout.finish([1.0, 1.0], [1.0, 0.0])
    refill = RefillPolicy(CONFIG)
    taking = asyncio.ensure_future(rollout.taken(refill))
    async with asyncio.timeout(scaled(20)):
        while refill.replaced_count < 1 or not (await rollout.account())["filtered"]:
            await asyncio.sleep(0.01)
        assert not taking.done()
        (another,) = await rollout.finish([0.0, 0.0])
        while refill.replaced_count < 2 or (await rollout.account())["filtered"] < 4:
            await asyncio.sleep(0.01)
        (last,) = await rollout.finish([0.0, 1.0])
        assert [one.group for one in await taking] == [telling, last]
    account = await rollout.account()
    assert (account["filtered"], account["in_flight"], account["lost"]) == (4, 4, 0)
    assert {silent, another}.isdisjoint({telling, last})


async def test_without_dynamic_sampling_the_step_takes_them(rollout: Rollout) -> None:
    finished = await rollout.finish([1.0, 1.0], [1.0, 0.0])
    refill = RefillPolicy(job("grpo", groups_per_step=2, group_size=2))
    async with asyncio.timeout(scaled(20)):
        assert [one.group for one in await rollout.taken(refill)] == finished
    assert refill.replaced_count == 0


async def test_a_group_that_cannot_be_read_goes_back_to_the_cursor_and_another_comes(
    rollout: Rollout,
) -> None:
    await rollout.finish([1.0, 0.0], garbled=True)
    (good,) = await rollout.finish([1.0, 0.0])
    await rollout.replaces(good)


async def test_a_group_whose_arrays_do_not_fit_together_goes_back_too(rollout: Rollout) -> None:
    made = group([1.0, 0.0], version=0, reference=True)
    await rollout.hand_in(replace(made, reference_logprobs=made.reference_logprobs[:-1]))
    (good,) = await rollout.finish([1.0, 0.0])
    await rollout.replaces(good)


async def test_tokens_staler_than_their_row_says_go_back_as_stale(rollout: Rollout) -> None:
    stale, good = await rollout.finish([1.0, 0.0], [1.0, 0.0])
    await rollout.replaces(good, stale, counted="stale_requeued")
    account = await rollout.account()
    assert (account["stale_requeued"], account["host_lost"]) == (2, 0)


async def test_a_group_of_a_damaged_file_goes_back(rollout: Rollout, tmp_path: Path) -> None:
    ids = await rollout.finish([1.0, 0.0], [1.0, 0.0])
    leased = await groups.lease_groups(
        rollout.mesh.state, JOB, rollout.mesh.name, rollout.mesh.token, 1
    )
    path = ChunkStore(tmp_path / "store").open_space(GROUPS).chunk_path(leased.groups[0].digest)
    flip(path, b"")
    await rollout.replaces(ids[1])
    found = await events.read_all(rollout.mesh.state)
    [told] = [event.fields for event in found if event.kind == "damaged"]
    assert (told["what"], told["job"], told["path"]) == ("group", JOB, str(path))
    kept = tmp_path / "store" / "quarantine" / GROUPS / path.parent.name / path.name
    assert told["aside"] == str(kept)


async def test_what_a_failed_member_sampled_makes_its_group_no_older(rollout: Rollout) -> None:
    made = group([1.0, np.nan, 0.0], version=3)
    made.versions[6:13] = [-1, -1, 0, 0, 0, 0, 0]
    failed = group([np.nan, np.nan], version=2)
    ids = [await rollout.hand_in(made), await rollout.hand_in(failed)]
    mesh = rollout.mesh
    leased = await groups.lease_groups(mesh.state, JOB, mesh.name, mesh.token, 1, ())
    rows = {row.group: row for row in leased.groups}
    assert [rows[i].min_version for i in ids] == [3, 2]


@pytest.mark.parametrize("still", ["asleep", "paused"])
@story_on(partial(run_virtual, limit_s=1e5), given=2)
async def test_who_sleeps_or_is_paused_waits_for_nobody_and_then_from_the_beginning(
    clock: VirtualClock, random: Random, still: str
) -> None:
    mesh = alone("trainer/job", clock, random, SimulatedHost(clock, random.child("host")))
    await mesh.join(None)
    await _training(mesh.state, CONFIG, mesh)
    intake = GroupIntake(mesh, BulkClient(mesh), JOB)
    taking = asyncio.ensure_future(anext(intake.stream_groups(1, lambda group: False)))

    def stand(stands: bool) -> None:
        if still == "paused":
            mesh.job_clock.set_paused(stands)
        elif stands:
            intake.is_awake.clear()
        else:
            intake.is_awake.set()

    def said() -> list[float]:
        waits = mesh.waits.list_longest([])
        assert all(wait["what"] == "ready groups" for wait in waits)
        return [clock.wall() - wait["since_ms"] / 1000 for wait in waits]

    await clock.sleep(30.0)
    assert said() == [pytest.approx(30.0, abs=0.1)]
    stand(True)
    await clock.sleep(3600.0)
    assert said() == []
    stand(False)
    await clock.sleep(5.0)
    assert said() == [pytest.approx(5.0, abs=0.1)]
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
