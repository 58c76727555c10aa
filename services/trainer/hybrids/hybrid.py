"""Hybrid: computes gradients of rounds for a training gang's core, and owns no state.

It joins under a generation and fetches weights before it requests rounds. It sums the gradients of
a block of rounds, and sends the sum while it computes the next block. It never delays a step: the
core computes the blocks that a hybrid does not return in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.api.calls.role import RoleControl, SetTier, TierUsage
from meshrl.common.api.stats import HybridStats
from meshrl.common.api.trainer import BlockResult, LeaveRequest, RoundLease, RoundRequest, Trainer
from meshrl.common.base.errors import CorruptData, Fenced, MeshError, NotFound
from meshrl.common.base.files.releasable_memory import ReleasableMemory
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.emulation import parse_training_speed
from meshrl.common.mesh.instances.kind_calls import KindCallsMixin
from meshrl.common.mesh.instances.kind_controller import KindController
from meshrl.common.mesh.instances.tiers import StatelessSleeper, TierController
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import RetryPolicy
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.compute.gradient_transfer import PIECE_TIMEOUT_S, GradientOutbox
from meshrl.services.trainer.compute.piece_runner import (
    GRADIENTS,
    PARAMETERS,
    TRAIN,
    EmulationTimer,
)
from meshrl.services.trainer.learner.gradient_sum import BlockSum
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.learner.memory import make_learner_kinds
from meshrl.services.trainer.learner.stats import BinStats

T = TypeVar("T")

LEASE_WAIT_S = 5.0  # maximum time that the core may wait before it answers a round request
RETRY_S = 0.3
COMPUTE_TIMEOUT_S = 600.0
RESULT_TIMEOUT_S = 30.0  # for an answer, in addition to the time to fetch the gradient


@dataclass
class LeasedBlock:
    """Block whose gradients this process sums."""

    update_id: str
    index: int
    owned_ranges: list[NDArray[np.int64]]  # of each rank
    dtype: str  # to which the sum is rounded
    gradients: BlockSum = field(default_factory=BlockSum)
    stats: BinStats = field(default_factory=BinStats)
    busy_s: float = 0.0


class Hybrid(StatelessSleeper, KindCallsMixin):
    """Actor that leases rounds from the core until it is drained."""

    interface = RoleControl

    def __init__(self, mesh: Mesh, data: JobData, placement: Placement, learner: Learner) -> None:
        self.mesh, self.data, self.placement = mesh, data, placement
        self.learner = learner
        self.bulk = BulkClient(mesh)
        self.outbox = GradientOutbox(mesh, placement.instance)
        self.time_slices = SliceClient(
            mesh,
            placement.slice_scheduler,
            placement.instance,
            placement.generation,
            enabled=placement.time_sliced,
        )
        pace = data.config.training.emulate
        self._emulation = parse_training_speed(pace) if pace else None
        self._emulation_timer = EmulationTimer(mesh.clock)
        self.rounds, self.bins = 0, 0
        self.busy_s = 0.0
        self._core = mesh.ref(f"trainer/{data.id}")
        self._generation = 0  # of the join; 0: not joined
        self._receiver = WeightReceiver(mesh, self.bulk, wants_deltas=True)
        self._manifest = ""  # of the weights that the learner has
        self._block: LeasedBlock | None = None  # being computed
        self._sent_block: LeasedBlock | None = None
        self._sending: asyncio.Task[None] | None = None
        self._is_draining = False
        self._has_left = asyncio.Event()
        self._is_awake = asyncio.Event()
        self._is_awake.set()
        self._learner_lock = asyncio.Lock()  # one piece of arithmetic at a time, none while asleep
        self._summed_block: LeasedBlock | None = None  # its sum is on the accelerator
        learner_kinds = make_learner_kinds(lambda: learner, self._get_gradients)
        self.kinds = KindController(
            mesh,
            {
                PARAMETERS: replace(learner_kinds[PARAMETERS], rebuild=self._rebuild_parameters),
                GRADIENTS: learner_kinds[GRADIENTS],
            },
            self._run_blocking,
            *mesh.settings.offload_targets,
            is_time_sliced=lambda: self.time_slices.is_enabled,
        )
        self.tiers = TierController(
            mesh,
            self,
            self.kinds,
            set_time_slicing=self.time_slices.set_enabled,
        )

    async def stop(self) -> None:
        await self.tiers.stop()
        await self._drop_blocks()
        self.outbox.close()

    def stats(self) -> HybridStats:
        counts = self._emulation_timer.late_counts if self._emulation is not None else {}
        return HybridStats(
            emulated_count=counts.get("emulated_count"),
            late_count=counts.get("late_count"),
            joined=self._generation,
            rounds=self.rounds,
            bins=self.bins,
            busy_s=self.busy_s,
            sent_bytes=self.outbox.staged_bytes,
        )

    def collect_stats(self) -> dict[str, Any]:
        residents = self.placement.initial_stats() | self.time_slices.stats() | self.tiers.stats()
        return residents | self.stats().encode()

    @call(RoleControl.drain)
    async def drain(self, request: str) -> None:
        """Leave the core at once; the core computes the current round itself."""
        self._is_draining = True
        self._is_awake.set()
        try:
            await self._leave_core()
        finally:
            self._has_left.set()

    @call(RoleControl.set_tier)
    async def set_tier(self, desired: SetTier) -> TierUsage:
        return await self.tiers.set_tier(desired)

    def _get_gradients(self) -> dict[str, Tensor]:
        block = self._summed_block
        total = block.gradients.total if block is not None else None
        return {} if total is None else {"sum": total}

    async def _rebuild_parameters(self, memory: ReleasableMemory) -> None:
        """Allocate the memory; the weights are fetched before the next round."""
        await self.kinds.reallocate(memory)
        self._manifest = ""

    async def sleep(self, tier: Tier) -> None:
        """Leave the core and release the learner's memory; the store has the weights."""
        self._is_awake.clear()
        try:
            await self._leave_core()
            await self._learner_lock.acquire()  # until it wakes; the current round ends first
            try:
                self._generation, self._manifest = 0, ""
                await self._drop_blocks()
                try:
                    await self.kinds.drop()
                except Exception:
                    await self.kinds.load()  # weights are fetched again
                    raise
            except BaseException:
                self._learner_lock.release()
                raise
        except BaseException:
            self._is_awake.set()
            raise

    async def wake(self) -> None:
        """Reallocate the memory; `serve` then joins under a new generation and fetches weights."""
        await self.kinds.load()
        self._generation = 0
        self._learner_lock.release()
        self._is_awake.set()

    async def _leave_core(self) -> None:
        generation, self._generation = self._generation, 0
        try:
            if generation:
                await self._core.call(
                    Trainer.leave_hybrid, LeaveRequest(self.placement.instance, generation)
                )
        except MeshError as error:  # an unreachable core has forgotten the hybrid already
            self.mesh.telemetry.log.info("leaving", error=str(error))

    async def serve(self) -> None:
        """Compute rounds until drained; retry an unreachable core within `RetryPolicy`."""
        patience = RetryPolicy(self.mesh.job_clock)
        while not self._is_draining:
            await self._is_awake.wait()
            if self._is_draining:
                break
            try:
                await self._run_round()
                patience.record_success()
            except Fenced as error:  # the core does not know this join any more: join again
                self.mesh.telemetry.log.info("joining again", error=str(error))
                self._generation = 0
                await self._drop_blocks()
            except MeshError as error:
                self.mesh.telemetry.log.info("repeating the request", error=str(error))
                patience.record_failure(error)
                await self.mesh.clock.sleep(RETRY_S)
        await self._has_left.wait()  # else the caller of `drain` would get no answer

    async def _run_round(self) -> None:
        if self._sending is not None and self._sending.done():
            await self._finish_sending()
        if not self._generation:
            self._generation = await self._core.call(Trainer.join_hybrid, self.placement.instance)
        lease = await self._core.call(
            Trainer.lease_round, self._build_request(), deadline_s=LEASE_WAIT_S + 5.0
        )
        if self._block is not None and (lease.index >= 0 or lease.is_complete):
            held = self._block.update_id, self._block.index, self._block.gradients.rounds
            if held != (lease.update_id, lease.block, lease.rounds_before):
                self._block = None  # its lease has ended
        elif self._block is not None and lease.update_id != self._block.update_id:
            self._block = None
        if lease.index >= 0:
            await self._compute_round(lease)
        elif lease.manifest not in ("", self._manifest):
            self._block = None
            await self._fetch_weights(lease.manifest)
        if lease.is_complete and self._block is not None:
            await self._send_block(self._block)

    def _build_request(self) -> RoundRequest:
        block, sent = self._block, self._sent_block
        update_id = block.update_id if block else sent.update_id if sent else ""
        return RoundRequest(
            instance=self.placement.instance,
            generation=self._generation,
            manifest=self._manifest,
            wait_s=LEASE_WAIT_S,
            update_id=update_id,
            block=block.index if block else -1,
            rounds_done=block.gradients.rounds if block else 0,
            sent_block=sent.index if sent and sent.update_id == update_id else -1,
        )

    # -- sums that are sent while the next block is computed ---------------------------------------

    async def _send_block(self, block: LeasedBlock) -> None:
        """Begin to send the sum of a block, once the previous one has been sent.

        The sum moves to host memory, so that the accelerator has room for the next one.
        """
        self._block = None
        await self._finish_sending()
        self._sent_block = block

        async def move_to_host() -> Tensor:
            async with self.kinds.use_kinds((GRADIENTS,)):
                total = await self._run_blocking(_move_sum_to_host, block)
                self._forget_sum()
                return total

        total = await self.time_slices.run_in_slice(
            TRAIN.function, move_to_host, kinds=(GRADIENTS,)
        )
        if not self._generation:  # it has left, to sleep or for ever
            self._sent_block = None
            return
        self._sending = asyncio.create_task(self._transfer_block(block, total), name="gradient")

    async def _finish_sending(self) -> None:
        """Wait until the current sum has been sent; raise the error that ended the transfer."""
        sending = self._sending
        if sending is not None:
            try:
                await sending
            finally:
                sending.cancel()
                self._sending, self._sent_block = None, None

    async def _transfer_block(self, block: LeasedBlock, total: Tensor) -> None:
        began = self.mesh.clock.monotonic()
        chunks = await self.outbox.put(total, block.owned_ranges)
        del total
        result = BlockResult(
            instance=self.placement.instance,
            generation=self._generation,
            update_id=block.update_id,
            block=block.index,
            rounds=block.gradients.rounds,
            chunks=chunks,
            stats=asdict(block.stats),
            busy_s=block.busy_s,
            staged_s=self.mesh.clock.monotonic() - began,
        )
        # The ranks fetch the gradient before the core answers.
        pieces = sum(map(len, result.chunks))
        deadline_s = RESULT_TIMEOUT_S + PIECE_TIMEOUT_S * pieces
        await self._core.call(Trainer.complete_block, result, deadline_s=deadline_s)

    async def _drop_blocks(self) -> None:
        """Stop sending, and free the sums."""
        sending, self._block, self._sent_block, self._sending = self._sending, None, None, None
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        async with self.kinds.use_kinds():
            self._forget_sum()

    def _forget_sum(self) -> None:
        self._summed_block = None
        self.kinds.forget_tensors(GRADIENTS)

    async def _fetch_weights(self, manifest: str) -> None:
        """Load the weights of the next rounds, before any round is requested."""
        self._manifest = ""  # an interrupted load leaves no version in the learner
        try:
            weights = (await self._receiver.receive(manifest)).tensors
        except (CorruptData, NotFound) as error:
            self.mesh.telemetry.log.error("weights are corrupt", error=str(error))
            await self._core.call(Trainer.restage_version, manifest)
            await self.mesh.clock.sleep(RETRY_S)
            return  # the next round request returns the weights needed by then

        async def load() -> None:
            async with self.kinds.use_kinds((PARAMETERS,), (PARAMETERS,)):
                await self._run_blocking(self.learner.load_weights, weights)
                self._manifest = manifest

        async with self._use_learner():
            await self.time_slices.run_in_slice("sync", load, kinds=(PARAMETERS,))

    @asynccontextmanager
    async def _use_learner(self) -> AsyncIterator[None]:
        """Lock the learner for one use; raise Fenced if the hybrid is to sleep."""
        if not self._is_awake.is_set():
            raise Fenced("the hybrid sleeps", where=self.mesh.name)
        async with self._learner_lock:
            yield

    async def _compute_round(self, lease: RoundLease) -> None:
        """Add the gradient of a round to the sum of its block."""
        clock = self.mesh.clock
        began = clock.monotonic() - self.time_slices.wait_time_s
        bins = [bin for arrays in lease.bins if (bin := Bin.from_arrays(arrays)).loss_token_count]
        block = self._block or LeasedBlock(
            lease.update_id, lease.block, lease.owned_ranges, lease.gradient_dtype
        )
        self._block = None  # while it changes

        async def compute_gradient() -> tuple[Tensor, BinStats]:
            tokens = sum(len(bin.tokens) for bin in bins)
            seconds = (
                self._emulation.compute_gradient_s(tokens) if self._emulation is not None else 0.0
            )
            work = partial(self._run_blocking, self.learner.compute_round_gradient, bins)
            return (
                await self._emulation_timer.run_padded(seconds, work) if seconds else await work()
            )

        async def compute() -> BinStats:
            async with self.kinds.use_kinds(TRAIN.tensor_kinds, TRAIN.changed_kinds):
                if not self._manifest:
                    raise Fenced("the weights of this round were dropped", where=self.mesh.name)
                if self._summed_block is not block:  # the sum of an earlier block is not needed
                    self._forget_sum()
                gradient, stats = await compute_gradient()
                self._summed_block = block
                await self._run_blocking(block.gradients.add, gradient)
                return stats

        async with self._use_learner():
            stats = await self.time_slices.run_in_slice(
                TRAIN.function, compute, kinds=TRAIN.tensor_kinds
            )
        compute_s = clock.monotonic() - self.time_slices.wait_time_s - began
        self.rounds += 1
        self.bins += len(bins)
        self.busy_s += compute_s
        block.busy_s += compute_s
        block.stats = block.stats + stats if block.gradients.rounds > 1 else stats
        self._block = block

    async def _run_blocking(self, work: Callable[..., T], *args: Any) -> T:
        return await self.mesh.host.run_blocking(work, *args, deadline_s=COMPUTE_TIMEOUT_S)


def _move_sum_to_host(block: LeasedBlock) -> Tensor:
    """Return the rounded sum of a block in host memory; free it on the accelerator."""
    total = block.gradients.close(getattr(torch, block.dtype)).cpu()
    block.gradients.total = None
    return total
