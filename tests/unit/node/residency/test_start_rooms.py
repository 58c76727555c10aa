"""Processes that start or wake on an accelerator which other instances fill."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from meshrl.common.api.calls.role import RoleControl
from meshrl.common.api.node import CreateSegment
from meshrl.common.base.files.offload_media import make_segment_key
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.scheduling.feasibility import SliceBytes
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import Gang, InstancePhase, Role, Tier, TierBytes
from meshrl.services.node.instances.desired_roles import DesiredRole
from meshrl.services.node.residency.start_rooms import (
    FIRST_RANK_TIMEOUT_S,
    MAX_START_ROOM_S,
    START_ROOM_TIMEOUT_S,
)
from tests.unit.node.residency.shared_worker import A, B, SharedWorker, run_worker


class SlowlyLoadingB(SharedWorker):
    """Worker whose instance B starts slowly and publishes its progress."""

    reports = 10

    async def load(self, mesh: Mesh, seat: Placement) -> None:
        if seat.instance != B.id:
            return
        stats = {"generation": seat.generation, "progress": 0}
        await mesh.announce(RoleControl, lambda: stats)
        for _ in range(self.reports):
            await self.clock.sleep(0.5 * START_ROOM_TIMEOUT_S)
            stats["progress"] += 1


def test_process_starts_when_others_have_left_its_room_and_all_compute() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A)
        await shared.until_steps(A, 3)
        assert not any(one.startswith("offload") for one in shared.roles[A.id].calls)
        shared.set_desired(A, B)
        await shared.until_steps(B, 3)
        steps = shared.roles[A.id].steps
        await shared.until_steps(A, steps + 5)
        assert shared.tiers.most[Tier.ACCELERATOR] <= 160
        assert shared.process(B).restarts == 0

    run_worker(story, TierBytes(160), SharedWorker)


def test_process_that_fits_starts_without_a_time_slice() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A)
        await shared.until_steps(A, 3)
        shared.set_desired(A, B)
        await shared.until_steps(B, 3)
        slices = shared.worker.slice_scheduler.granted_count
        assert slices <= shared.roles[A.id].steps + shared.roles[B.id].steps + 2
        assert not any(one.startswith("offload") for one in shared.roles[A.id].calls)

    run_worker(story, TierBytes(200), SharedWorker)


def test_killed_process_gets_its_room_back_before_it_restarts() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A, B)
        await shared.until_steps(A, 3, 120.0)
        await shared.until_steps(B, 3, 120.0)
        await shared.worker.instances.kill(B.id, 1, "a test")
        await shared.until("B restarted", lambda: shared.process(B).restarts == 1, 10.0)
        await shared.until_steps(B, 3, 120.0)
        assert shared.tiers.most[Tier.ACCELERATOR] <= 160

    run_worker(story, TierBytes(160), SharedWorker)


def test_processes_that_exit_at_once_restart_one_after_the_other() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A, B)
        await shared.until_steps(A, 2, 120.0)
        await shared.until_steps(B, 2, 120.0)
        instances, roles = shared.worker.instances, dict(shared.roles)
        await asyncio.gather(*(instances.kill(one.id, 1, "a test") for one in (A, B)))

        def is_new(instance: str) -> bool:
            return shared.roles[instance] is not roles[instance]

        for one in (A, B):
            await shared.until("new", partial(is_new, one.id), 2 * START_ROOM_TIMEOUT_S)
            await shared.until_steps(one, 2, 120.0)
        assert shared.tiers.most[Tier.ACCELERATOR] <= 160
        assert shared.process(A).restarts == shared.process(B).restarts == 1

    run_worker(story, TierBytes(160), SharedWorker)


@pytest.mark.parametrize("has_record", [False, True])
def test_only_copies_with_a_record_outlast_their_process(has_record: bool) -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A)
        await shared.until_steps(A, 1)
        name, budgets = f"engine/{A.id}", shared.worker.instances.context.budgets
        directory = shared.settings.make_offload_directory(shared.mesh.name)
        parts = ["optimizer", *([""] if has_record else [])]
        keys = [make_segment_key(name, part) for part in parts]
        files = [make_offload_path(directory, name, part) for part in parts]
        for key, file in zip(keys, files, strict=True):
            shared.segments.create(CreateSegment(key, 4096))
            shared.segments.commit(key)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"a copy")
        budgets.record_usage(name, TierBytes(memory=60, disk=40), can_move=True)
        await shared.worker.instances.kill(A.id, 1, "a test")
        await shared.until("restarted", lambda: shared.process(A).restarts == 1, 10.0)
        left = TierBytes(memory=60, disk=40) if has_record else TierBytes()
        assert budgets.get_usage(name) == left
        assert set(shared.segments.keys) == set(keys if has_record else [])
        assert [file.exists() for file in files] == [has_record] * len(files)

    run_worker(story, TierBytes(), SharedWorker)


def test_process_sleeps_and_wakes_beside_another() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A, B)
        await shared.until_steps(A, 3, 120.0)
        await shared.until_steps(B, 3, 120.0)
        asleep = replace(B, tier=Tier.MEMORY, epoch=2)
        shared.set_desired(A, asleep)
        await shared.until("B sleeps", lambda: shared.process(B).tier == Tier.MEMORY, 60.0)
        assert not shared.roles[B.id].buffers[Tier.ACCELERATOR]
        await shared.until_steps(A, shared.roles[A.id].steps + 3)
        shared.set_desired(A, replace(asleep, tier=Tier.ACCELERATOR, epoch=3))
        await shared.until_steps(B, shared.roles[B.id].steps + 3)
        await shared.until_steps(A, shared.roles[A.id].steps + 3)
        assert shared.tiers.most[Tier.ACCELERATOR] <= 160

    run_worker(story, TierBytes(160), SharedWorker)


def test_worker_publishes_the_rates_of_its_moves() -> None:
    async def story(shared: SharedWorker) -> None:
        assert (await shared.worker.register()).copy_rates == {}
        shared.set_desired(A, B)
        await shared.until_steps(A, 3, 120.0)
        await shared.until_steps(B, 3, 120.0)
        await shared.worker.publish_copy_rates()
        [row] = await pool.read_workers(shared.state)
        rates = shared.worker.residency.copy_rates
        assert {"accelerator>memory", "memory>accelerator"} <= row.copy_rates.keys()
        assert row.copy_rates == pytest.approx(rates) and row.revision == 1

    run_worker(story, TierBytes(160), SharedWorker)


@pytest.mark.parametrize("reports", [3, pytest.param(60, marks=pytest.mark.deep)])
def test_process_keeps_its_room_while_its_start_makes_progress(reports: int) -> None:
    async def story(shared: SlowlyLoadingB) -> None:
        shared.reports = reports
        shared.set_desired(A)
        await shared.until_steps(A, 3)
        shared.set_desired(A, B)
        await shared.until("B starts", lambda: bool(shared._find(B) and shared.process(B).pid), 30)
        began, steps = shared.clock.monotonic(), shared.roles[A.id].steps
        if reports == 3:
            await shared.until_steps(B, 3, MAX_START_ROOM_S)
            assert shared.roles[A.id].steps <= steps + 3 and shared.process(B).restarts == 0
        else:
            await shared.until_steps(A, steps + 3, MAX_START_ROOM_S + 30)
            assert shared.clock.monotonic() - began >= MAX_START_ROOM_S - 5

    run_worker(story, TierBytes(160), SlowlyLoadingB)


def test_process_that_never_fits_is_reported_with_the_figures() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A)
        process = await shared.process_of(A)
        await shared.until("refused", lambda: process.phase == InstancePhase.FAILED, 10.0)
        assert "needs 100 bytes of the accelerator, of whose 90 bytes" in process.detail

    run_worker(story, TierBytes(90), SharedWorker)


def test_rank_that_starts_alone_acquires_a_time_slice_of_its_own() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A)
        await shared.until_steps(A, 3)
        shared.worker.slice_scheduler.set_gang(Gang("g0", ("w0",), 1, (A, B)))
        core = replace(B, role=Role.TRAINING, core=True, ranks=(1, 0))  # its first rank runs
        role = DesiredRole("g0", core, 0, "worker/w0")
        residency = shared.worker.residency
        began = shared.clock.monotonic()
        while not residency.reserve(role, SliceBytes(61, 61, 61)):
            await shared.clock.sleep(0.1)
        assert shared.clock.monotonic() - began >= FIRST_RANK_TIMEOUT_S
        assert shared.tiers.used[Tier.ACCELERATOR] <= 99
        # it may take the room again from a process that does not use it
        await shared.until_steps(A, shared.roles[A.id].steps + 1, START_ROOM_TIMEOUT_S + 10)

    run_worker(story, TierBytes(160), SharedWorker)
