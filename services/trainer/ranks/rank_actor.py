"""Actor of a rank beside the first: it executes the core's orders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api import ranks as orders
from meshrl.common.api.calls.role import SetTier, TierUsage
from meshrl.common.api.ranks import (
    COMPUTE_TIMEOUT_S,
    FORM_MARGIN_S,
    STATE_TRANSFER_TIMEOUT_S,
    UPDATE_SETTINGS_TIMEOUT_S,
    Ranks,
    SleepOrder,
)
from meshrl.common.api.stats import RankStats
from meshrl.common.base.errors import CorruptData, Fenced, MeshError, Refused
from meshrl.common.base.files.path_checks import resolve_below
from meshrl.common.base.host.interfaces import find_address
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.mesh.instances.offload_storage import OffloadStorage
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.transports.rendezvous import is_multi_host, rendezvous_directory
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.compute.gradient_transfer import fetch_gradient
from meshrl.services.trainer.learner.memory import LearnerMemory, reallocate_memory
from meshrl.services.trainer.ranks import network_interface
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.rank_faults import describe_fault
from meshrl.services.trainer.ranks.rank_thread import RankThread
from meshrl.services.trainer.ranks.row_tasks import RowRestorer, RowSaver, RowStager

# Runs blocking work on the thread of the rank's arithmetic.
RunBlocking = Callable[..., Awaitable[Any]]
# Keys of the state that is equal on all ranks.
SHARED_STATE_KEYS = ("job", "lineage", "version", "manifest", "ranks", "counts")


class SleepingRows:
    """Rows of one rank, which sleep in steps that rank 0 orders, so that all ranks sleep or none.

    `tier` is where the rows are.
    """

    def __init__(self, rank: Rank, run: RunBlocking, places: OffloadStorage, process: str) -> None:
        self._rank, self._run, self.places, self._process = rank, run, places, process
        self.tier = Tier.ACCELERATOR
        self._memory: LearnerMemory | None = None
        self._copy_tier = Tier.ACCELERATOR  # tier of an offloaded copy; accelerator: there is none

    @property
    def size_bytes(self) -> int:
        awake = self.tier == Tier.ACCELERATOR or self._copy_tier == Tier.ACCELERATOR
        return self._rank.size_bytes if awake else 0

    @property
    def has_copy(self) -> bool:
        return self._copy_tier != Tier.ACCELERATOR

    async def execute_order(self, order: SleepOrder) -> None:
        """Execute a sleep order; a repeated order changes nothing."""
        tier = Tier(order.tier)
        if order.action == "keep":
            self._memory = await self._run_blocking(
                partial(self._rank.collect_memory, include_gradients=True)
            )
            await self.places.save(tier, order.metadata, self._memory.offloaded)
            self._copy_tier = tier
        elif order.action == "release" and self._memory is not None:
            await self._run_blocking(self._memory.release)
            self.tier = self._copy_tier
        elif (
            order.action == "take"
            and self._memory is not None
            and self._copy_tier != Tier.ACCELERATOR
        ):
            await self._restore(self._memory)
        elif order.action == "move" and tier == Tier.ABSENT:
            await self.places.drop_all()
            self.tier = tier  # its worker may stop the process from here on
        elif order.action == "move" and tier == Tier.ACCELERATOR:
            self.tier = self._copy_tier  # the removal was cancelled
        elif order.action == "move" and self._copy_tier not in (tier, Tier.ACCELERATOR):
            await self.places.move(self._copy_tier, tier)
            self._copy_tier = self.tier = tier
        elif order.action == "resume":
            await self._resume(order.metadata)
        elif order.action in ("discard", "forget"):
            self._copy_tier, self._memory = Tier.ACCELERATOR, None
            await self.places.drop_all()

    def reset(self) -> None:
        """Reset the tiers when the rows are created again; offloaded state stays for `resume`."""
        self.tier = self._copy_tier = Tier.ACCELERATOR
        self._memory = None

    def set_tier(self, tier: Tier) -> None:
        """Record a tier at which the rank has no state."""
        self.tier = self._copy_tier = tier

    async def _restore(self, memory: LearnerMemory) -> None:
        await reallocate_memory(memory, self._run_blocking, self._process)
        try:
            await self.places.restore(self._copy_tier, memory.offloaded)
        except CorruptData:
            raise
        except BaseException:
            await self._run_blocking(memory.release)
            raise
        await self._run_blocking(memory.refresh_derived)
        self.tier = Tier.ACCELERATOR

    async def _resume(self, saved_state: dict[str, Any]) -> None:
        found = await self.places.find_stored()
        if found is None:
            raise Refused("this process has no complete offloaded state", where=self._process)
        tier, head = found
        if any(head.metadata.get(key) != saved_state[key] for key in SHARED_STATE_KEYS):
            raise Refused(
                "the offloaded state of this process belongs to another step", where=self._process
            )
        memory = await self._run_blocking(
            partial(self._rank.collect_memory, include_gradients=False)
        )
        await self.places.restore(tier, memory.offloaded)
        await self._run_blocking(
            partial(self._rank.learner.resume_from_counts, saved_state["counts"])
        )

    async def _run_blocking(self, work: Callable[..., Any], *args: Any) -> Any:
        return await self._run(work, *args, deadline_s=STATE_TRANSFER_TIMEOUT_S)


TIER_TIMEOUT_S = 600.0  # for rank 0 to bring all ranks to a tier
POLL_S = 0.05  # between two checks of the tier
FETCH_TIMEOUT_S = STATE_TRANSFER_TIMEOUT_S - 60.0  # for this rank's rows of a hybrid's gradient
DISCARD_TIMEOUT_S = 10.0  # for rank 0 to order, after that, that offloaded state may be discarded


class RankActor(Actor):
    """Actor that obeys the newest core: orders of an earlier generation are rejected."""

    interface = Ranks

    def __init__(self, mesh: Mesh, data: JobData, placement: Placement, rank: Rank) -> None:
        group_s = data.config.training.rank_deadline_s
        self._mesh, self._placement, self._rank = mesh, placement, rank
        self._generation = 0
        # Names from rank 0 on this host refer to files there.
        self._rendezvous_dir = rendezvous_directory(mesh.settings)
        self._thread = RankThread(mesh, group_s)
        self._bulk = BulkClient(mesh)
        self._fetched_rows: dict[int, NDArray[np.float32]] = {}  # of hybrids, by transfer
        about = mesh, self._bulk, data, rank, self._thread.run
        self._row_saver, self._row_restorer = RowSaver(*about), RowRestorer(*about)
        self._row_stager = RowStager(*about)
        self._is_drained = asyncio.Event()
        self._epoch = 0  # of the last desired state
        places = OffloadStorage(mesh, *mesh.settings.offload_targets)
        self._rows = SleepingRows(rank, self._thread.run, places, mesh.name)

    def collect_stats(self) -> dict[str, Any]:
        late = self._rank.late_counts
        stats = RankStats(
            emulated_count=late.get("emulated_count"),
            late_count=late.get("late_count"),
            group=self._generation,
            epoch=self._epoch,
            tier=str(self._rows.tier),
        )
        return self._placement.initial_stats() | stats.encode()

    @call(Ranks.drain)
    def drain(self, request: str) -> None:
        """Accept a drain; the core repeats the step on the next gang."""
        self._is_drained.set()

    @call(Ranks.set_tier)
    async def set_tier(self, desired: SetTier) -> TierUsage:
        """Return once this rank's rows are at the desired tier.

        Rank 0 moves the rows of all ranks. Tier `absent` is reached once rank 0 has gathered them.
        A rank in no group has no rows: one that restarted while its gang sleeps is asleep with it,
        until rank 0 forms the gang again.
        """
        if desired.epoch < self._epoch:
            raise Fenced(
                f"a desired state of epoch {desired.epoch}, but the last one has epoch "
                f"{self._epoch}",
                where=self._mesh.name,
                fix="Read the record again",
            )
        self._epoch = desired.epoch
        places = self._rows.places
        places.set_targets(desired.segment_owner, desired.offload_dir)
        async with self._mesh.clock.timeout(TIER_TIMEOUT_S, "waiting for an order of rank 0"):
            while self._rows.tier != desired.tier and self._epoch == desired.epoch:
                if desired.tier != Tier.ACCELERATOR and not self._generation:
                    self._rows.set_tier(Tier(desired.tier))
                    break
                await self._mesh.clock.sleep(POLL_S)
        if desired.tier == Tier.ACCELERATOR:
            # Wait until rank 0 has had the offloaded state discarded, once all ranks have restored
            # theirs. If rank 0 does not, report that state as usage.
            until = self._mesh.clock.monotonic() + DISCARD_TIMEOUT_S
            while self._rows.has_copy and self._mesh.clock.monotonic() < until:
                await self._mesh.clock.sleep(POLL_S)
        stored_bytes = places.stored_bytes
        return TierUsage(self._rows.size_bytes, stored_bytes[Tier.MEMORY], stored_bytes[Tier.DISK])

    @call(Ranks.execute_sleep_order)
    async def execute_sleep_order(self, order: orders.SleepOrder) -> None:
        self._check_generation(order.generation)
        await self._rows.execute_order(order)

    async def wait_until_drained(self) -> None:
        await self._is_drained.wait()

    @call(Ranks.stand_by)
    async def stand_by(self, order: orders.RankOrder) -> orders.StandbyAnswer:
        if order.generation < self._generation:
            raise self._make_fenced_error(order.generation)
        self._generation = order.generation
        self._fetched_rows = {}
        self._rows.reset()
        await self._row_stager.close()
        await self._row_restorer.close()
        await self._thread.leave(self._rank.leave)
        await self._thread.wait_idle()
        await self._row_saver.clear_unfinished()
        settings = self._mesh.settings
        return orders.StandbyAnswer(
            settings.host, find_address(network_interface.find_rank_interface(settings))
        )

    @call(Ranks.form_group)
    async def form(self, rendezvous: orders.Rendezvous) -> None:
        self._check_generation(rendezvous.generation)
        wide = is_multi_host(rendezvous.rendezvous_url)
        if not wide:
            resolve_below(self._rendezvous_dir, rendezvous.rendezvous_url, self._mesh.name)
        interface = (
            network_interface.find_rank_interface(self._mesh.settings)
            if wide
            else network_interface.LOOPBACK
        )
        within_s = rendezvous.form_timeout_s + FORM_MARGIN_S
        await self._thread.run(self._rank.join, rendezvous, interface, deadline_s=within_s)

    @call(Ranks.create_model)
    async def create_model(self, order: orders.CreateModel) -> None:
        self._check_generation(order.generation)
        await self._thread.run(self._rank.create_model, deadline_s=order.timeout_s)

    @call(Ranks.begin_step)
    def begin_step(self, order: orders.BeginStep) -> None:
        self._check_generation(order.generation)
        self._rank.begin_step(order.block_rounds, order.gradient_dtype)
        self._fetched_rows = {}

    @call(Ranks.compute_round)
    async def compute_round(self, part: orders.ComputeRound) -> orders.RoundStats:
        self._check_generation(part.generation)
        bins = [Bin.from_arrays(bin) for bin in part.bins]
        stats = await self._thread.run(
            self._rank.compute_round, part.index, bins, deadline_s=COMPUTE_TIMEOUT_S
        )
        return orders.RoundStats([asdict(one) for one in stats])

    @call(Ranks.fetch_gradient)
    async def fetch_gradient(self, order: orders.FetchGradient) -> orders.RankFault:
        self._check_generation(order.generation)
        fetched_rows = self._fetched_rows  # of this step
        try:
            # Below the deadline of this call, which would end the gang for a slow hybrid.
            async with self._mesh.clock.timeout(FETCH_TIMEOUT_S, "fetching a hybrid's gradient"):
                fetched_rows[order.transfer_id] = await fetch_gradient(
                    self._mesh, self._bulk, order.hybrid, order.chunks, order.element_count
                )
        except MeshError as error:  # the core computes the rounds of the hybrid
            return describe_fault(error)
        return orders.RankFault()

    @call(Ranks.add_gradient)
    async def add_gradient(self, order: orders.AddGradient) -> None:
        self._check_generation(order.generation)
        rows = self._fetched_rows.pop(order.transfer_id, None)
        if rows is not None and order.block >= 0:
            add, run = self._rank.make_gradient_adder(), self._mesh.host.run_blocking
            await run(add, order.block, rows, deadline_s=STATE_TRANSFER_TIMEOUT_S)

    @call(Ranks.update_settings)
    async def update_settings(self, order: orders.UpdateSettings) -> None:
        self._check_generation(order.generation)
        settings = AlgorithmConfig(**order.algorithm), OptimizerConfig(**order.optimizer)
        await self._thread.run(
            self._rank.learner.update_settings, *settings, deadline_s=UPDATE_SETTINGS_TIMEOUT_S
        )

    @call(Ranks.apply_gradient)
    async def apply_gradient(self, update: orders.ApplyGradient) -> float:
        self._check_generation(update.generation)
        about = update.rounds, update.denominator, update.lr_factor
        norm = await self._thread.run(
            self._rank.apply_gradient, *about, deadline_s=COMPUTE_TIMEOUT_S
        )
        return norm

    @call(Ranks.score_bin)
    async def score(self, part: orders.ScoreBin) -> orders.BinScores:
        self._check_generation(part.generation)
        bin = Bin.from_arrays(part.bin)
        return orders.BinScores(
            await self._thread.run(
                self._rank.score, bin, part.quantity, deadline_s=COMPUTE_TIMEOUT_S
            )
        )

    @call(Ranks.stage_rows)
    async def stage(self, order: orders.StageRows) -> None:
        self._check_generation(order.generation)
        await self._row_stager.stage(order)

    @call(Ranks.finish_staging)
    async def finish_staging(self, order: orders.FinishStaging) -> orders.StagingResult:
        self._check_generation(order.generation)
        return await self._row_stager.finish(order)

    @call(Ranks.save_rows)
    async def save(self, order: orders.SaveRows) -> orders.RankFault:
        self._check_generation(order.generation)
        return await self._row_saver.save(order)

    @call(Ranks.finish_saving)
    async def finish_saving(self, order: orders.FinishSaving) -> orders.SavingResult:
        self._check_generation(order.generation)
        return await self._row_saver.finish(order)

    @call(Ranks.restore_rows)
    async def restore(self, order: orders.RestoreRows) -> orders.RestoreResult:
        self._check_generation(order.generation)
        return await self._row_restorer.restore(order)

    @call(Ranks.load_weights)
    async def load_weights(self, order: orders.LoadWeightRows) -> None:
        self._check_generation(order.generation)
        await self._thread.run(
            self._rank.learner.scatter_weights,
            order.tensor_names,
            None,
            deadline_s=self._rank.state_timeout_s,
        )

    def _check_generation(self, generation: int) -> None:
        if generation != self._generation:
            raise self._make_fenced_error(generation)

    def _make_fenced_error(self, generation: int) -> Fenced:
        return Fenced(
            f"an order has generation {generation}, but this rank has {self._generation}",
            where=self._mesh.name,
        )
