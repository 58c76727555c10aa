"""Steps that a core shares with hybrids over sockets: same bits, bytes sent, and losses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshrl.common.api.calls.interface import Interface
from meshrl.common.api.trainer import (
    BlockResult,
    LeaveRequest,
    RoundLease,
    RoundRequest,
    Trainer,
)
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.kernels.bin_cost import BinCost, CostCalibration
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.compute.gradient_transfer import make_hybrid_name
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.hybrids.gradient_collector import GradientCollector
from meshrl.services.trainer.hybrids.hybrid import Hybrid, LeasedBlock
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.meshes import on_sockets
from tests.unit.trainer.ranks.batches_under_test import bins_of_step, fresh_learner
from tests.unit.trainer.tiers.bench import make_config

ROUNDS = 8
WEIGHTS = "weights"


class HybridCalls(Interface):
    """Part of a core's interface that hybrids call."""


CALLS = ("join_hybrid", "leave_hybrid", "lease_round", "complete_block")
HybridCalls.methods = {name: Trainer.methods[name] for name in CALLS}


class Core(Actor):
    """Core of one rank with its rounds."""

    interface = HybridCalls

    def __init__(self, mesh: Mesh, bin_deadline_s: float) -> None:
        self.learner = fresh_learner("plain")
        self.compute = GangCompute(mesh, "j", Rank.for_single_rank(self.learner))
        costs = CostCalibration(BinCost(), 80)
        self.collector = GradientCollector(mesh, self.compute, "g0", bin_deadline_s, costs)

    @call(Trainer.join_hybrid)
    def join_hybrid(self, instance: str) -> int:
        return self.collector.add_hybrid(instance)

    @call(Trainer.leave_hybrid)
    def leave_hybrid(self, request: LeaveRequest) -> None:
        self.collector.remove_hybrid(request.instance, request.generation)

    @call(Trainer.lease_round)
    async def lease_round(self, request: RoundRequest) -> RoundLease:
        return await self.collector.lease_round(request)

    @call(Trainer.complete_block)
    async def complete_block(self, result: BlockResult) -> None:
        await self.collector.accept_result(result)


class PlacedHybrid(Hybrid):
    """Hybrid that has the weights already."""

    loses_gradients = False  # its chunks are gone before the core fetches them
    hangs_after = ROUNDS  # rounds

    async def _fetch_weights(self, manifest: str) -> None:
        self._manifest = manifest

    async def _compute_round(self, lease: RoundLease) -> None:
        if self.rounds >= self.hangs_after:
            await asyncio.Event().wait()
        await super()._compute_round(lease)

    async def _transfer_block(self, block: LeasedBlock, total: torch.Tensor) -> None:
        if self.loses_gradients:
            put = self.outbox.put

            async def put_and_clear(*about: object) -> list[list[str]]:
                chunks = await put(*about)  # type: ignore[arg-type]
                await self.outbox.clear()
                return chunks

            self.outbox.put = put_and_clear  # type: ignore[method-assign, assignment]
        await super()._transfer_block(block, total)


class SharedMesh:
    """Mesh of a core and hybrids in this process."""

    def __init__(self, directory: Path) -> None:
        self.clock = SystemClock()
        self.state = open_simulated_state(self.clock)
        self.settings = MeshSettings(self.state.url, str(directory))
        self.directory = directory
        self.hybrids: list[PlacedHybrid] = []

    def mesh(self, name: str) -> Mesh:
        return on_sockets(name, self.state, self.clock, settings=self.settings)

    async def start_core(self, bin_deadline_s: float) -> Core:
        self.core_mesh = self.mesh("trainer/j")
        self.core = Core(self.core_mesh, bin_deadline_s)
        await self.core_mesh.join(self.core)
        return self.core

    @asynccontextmanager
    async def hybrid(self, instance: str) -> AsyncIterator[PlacedHybrid]:
        data = JobData("j", make_config("plain"), self.directory, self.directory)
        mesh = self.mesh(make_hybrid_name(instance))
        found = PlacedHybrid(mesh, data, Placement(instance, instance, "j", 1), learner())
        await mesh.join(found, bulk_address=found.outbox.address)
        serving = asyncio.create_task(found.serve())
        try:
            yield found
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await found.stop()
            await mesh.leave()


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[SharedMesh]:
    found = SharedMesh(tmp_path)
    yield found
    await found.core_mesh.leave()
    await found.state.close()


def learner() -> Learner:
    return fresh_learner("plain")


def rounds() -> list[list[Bin]]:
    return [[bin] for bin in (bins_of_step(0) + bins_of_step(1))[:ROUNDS]]


async def until(what: str, is_done: Callable[[], bool]) -> None:
    async with asyncio.timeout(scaled(30.0)):
        while not is_done():
            await asyncio.sleep(0.002)


async def train(
    core: Core, block_rounds: int, dtype: str, prepare: Callable[[], Awaitable[None]] | None = None
) -> float:
    """Train a step, of which hybrids compute some rounds in `prepare`; return the norm."""
    await core.collector.begin_update(WEIGHTS, block_rounds, dtype)
    core.collector.offer_rounds(rounds()[:3])
    core.collector.offer_rounds(rounds()[3:])
    core.collector.close_rounds()
    if prepare is not None:
        await prepare()
    async with asyncio.timeout(scaled(60.0)):
        stats = await core.collector.compute_rounds()
    assert stats.tokens == sum(bin.loss_token_count for one in rounds() for bin in one)
    return await core.compute.apply_gradient(ROUNDS, 100.0, 1.0)


async def train_alone(block_rounds: int, dtype: str, mesh: Mesh) -> dict[str, torch.Tensor]:
    core = Core(mesh, 1.0)
    await train(core, block_rounds, dtype)
    return core.learner.copy_weights()


def assert_equal(core: Core, expected: dict[str, torch.Tensor]) -> None:
    found = core.learner.copy_weights()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("block_rounds", "dtype", "sums"),
    [(1, "float32", 8), (4, "float32", 2), (8, "float32", 1), (8, "bfloat16", 0.5)],
)
async def test_hybrid_sends_one_sum_for_each_block(
    shared: SharedMesh, block_rounds: int, dtype: str, sums: float
) -> None:
    """Check the bytes, of which a sum in bfloat16 has half as many, and the update's bits."""
    core = await shared.start_core(bin_deadline_s=scaled(60.0))
    async with shared.hybrid("h1") as hybrid:
        blocks = ROUNDS // block_rounds

        async def prepare() -> None:
            board = core.collector._update.board  # type: ignore[union-attr]
            await until("all blocks", lambda: len(board.completed_blocks) == blocks)

        await train(core, block_rounds, dtype, prepare)
        assert hybrid.rounds == ROUNDS
        assert hybrid.outbox.staged_bytes == sums * 4 * core.compute.parameter_count
    assert_equal(core, await train_alone(block_rounds, dtype, shared.core_mesh))


async def test_core_computes_the_blocks_of_hybrids_that_fail(shared: SharedMesh) -> None:
    """Lose one hybrid that hangs in a block, one whose sums vanish, and one that leaves."""
    core = await shared.start_core(bin_deadline_s=0.2)
    async with shared.hybrid("hung") as hung, shared.hybrid("lossy") as lossy:
        hung.hangs_after, lossy.loses_gradients = 1, True
        async with shared.hybrid("leaving") as leaving:
            leaving.hangs_after = 1

            async def prepare() -> None:
                failing = hung, lossy, leaving
                await until("a round of each", lambda: all(one.rounds for one in failing))
                await leaving.drain("")

            await train(core, 2, "float32", prepare)
    assert {"g0", "lossy"} <= core.collector.busy_s.keys()
    assert_equal(core, await train_alone(2, "float32", shared.core_mesh))


async def test_update_that_fails_cancels_the_arrival_of_sums(shared: SharedMesh) -> None:
    core = await shared.start_core(bin_deadline_s=scaled(60.0))
    collector = core.collector
    async with shared.hybrid("h1"), core.compute.runner.gradient_lock:
        await collector.begin_update(WEIGHTS, ROUNDS)
        collector.offer_rounds(rounds())
        collector.close_rounds()
        work = collector._update
        assert work is not None
        await until("an arrival", lambda: bool(work.arrivals))
        computing = asyncio.create_task(collector.compute_rounds())
        await asyncio.sleep(0)
        computing.cancel()
        await asyncio.gather(computing, return_exceptions=True)
        assert not work.arrivals
    await train(core, 2, "float32")
    assert_equal(core, await train_alone(2, "float32", shared.core_mesh))


async def test_lost_answers_to_a_hybrid_repeat_its_round(shared: SharedMesh) -> None:
    core = await shared.start_core(bin_deadline_s=scaled(60.0))
    collector = core.collector
    generation = collector.add_hybrid("h1")
    request = RoundRequest("h1", generation, WEIGHTS, 0.0)
    await collector.begin_update(WEIGHTS, block_rounds=2)
    collector.offer_rounds(rounds()[:3])
    first, again = [await collector.lease_round(request) for _ in range(2)]
    assert (first.index, first.rounds_before, first.is_complete) == (0, 0, False)
    assert again == replace(first, bins=again.bins, owned_ranges=again.owned_ranges)
    held = replace(request, update_id=first.update_id, block=0, rounds_done=1)
    assert (await collector.lease_round(held)).is_complete
    sent = replace(held, block=-1, rounds_done=0, sent_block=0)
    second = await collector.lease_round(sent)
    assert (second.index, second.block) == (2, 1)
    held = replace(sent, block=1, rounds_done=1)
    waiting = await collector.lease_round(held)
    assert (waiting.index, waiting.is_complete) == (-1, False)
    collector.close_rounds()
    ended = await collector.lease_round(held)
    assert (ended.index, ended.block, ended.is_complete) == (-1, 1, True)
