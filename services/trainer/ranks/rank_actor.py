"""Actor of a rank beside the first: it executes the core's orders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
from meshrl.common.base.errors import Fenced, MeshError, Refused
from meshrl.common.base.files.path_checks import resolve_below
from meshrl.common.base.host.interfaces import find_address
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.mesh.instances.kind_calls import KindCallsMixin
from meshrl.common.mesh.instances.kind_controller import KindController
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.transports.rendezvous import is_multi_host, rendezvous_directory
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.compute.gradient_transfer import fetch_gradient
from meshrl.services.trainer.compute.piece_runner import (
    ADD,
    BEGIN,
    GRADIENTS,
    LOAD,
    SAVE,
    SCORE,
    SYNC,
    TRAIN,
    UPDATE,
    PieceKind,
)
from meshrl.services.trainer.ranks import network_interface
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.rank_faults import describe_fault
from meshrl.services.trainer.ranks.rank_thread import RankThread
from meshrl.services.trainer.ranks.row_tasks import RowRestorer, RowSaver, RowStager

# Keys of the state that is equal on all ranks.
SHARED_STATE_KEYS = ("job", "lineage", "version", "manifest", "ranks", "counts")


class SleepingRows:
    """Rows of one rank, which sleep in steps that rank 0 orders, so that all ranks sleep or none.

    `tier` is where the rows are.
    """

    def __init__(self, rank: Rank, kinds: KindController, process: str) -> None:
        self._rank, self._kinds, self._process = rank, kinds, process
        self.tier = Tier.ACCELERATOR
        self._copy_tier = Tier.ACCELERATOR  # tier of an offloaded copy; accelerator: there is none

    @property
    def has_copy(self) -> bool:
        return self._copy_tier != Tier.ACCELERATOR

    async def execute_order(self, order: SleepOrder) -> None:
        """Execute a sleep order; a repeated order changes nothing."""
        tier, kinds = Tier(order.tier), self._kinds
        if order.action == "keep":
            await kinds.write_back(tier)
            await kinds.save_record(tier, order.metadata)
            self._copy_tier = tier
        elif order.action == "release" and self.has_copy:
            await kinds.offload(self._copy_tier)
            self.tier = self._copy_tier
        elif order.action == "take" and self.has_copy:
            await kinds.load()
            self.tier, kinds.is_asleep = Tier.ACCELERATOR, False
        elif order.action == "move" and tier == Tier.ABSENT:
            await kinds.drop_copies(even_if_offloaded=True)
            self.tier = tier  # its worker may stop the process from here on
        elif order.action == "move" and tier == Tier.ACCELERATOR:
            self.tier = self._copy_tier  # the removal was cancelled
        elif order.action == "move" and self._copy_tier not in (tier, Tier.ACCELERATOR):
            await kinds.move_copies(tier)
            self._copy_tier = self.tier = tier
        elif order.action == "resume":
            await self._resume(order.metadata)
        elif order.action in ("discard", "forget"):
            kinds.is_asleep = False
            try:
                await kinds.drop_copies()
            finally:
                self._copy_tier = Tier.ACCELERATOR  # `set_tier` waits for it

    def reset(self) -> None:
        """Reset the tiers when the rows are created again; offloaded state stays for `resume`."""
        self.tier = self._copy_tier = Tier.ACCELERATOR
        self._kinds.reset()

    def set_tier(self, tier: Tier) -> None:
        """Record a tier at which the rank has no state."""
        self.tier = self._copy_tier = tier

    async def _resume(self, saved_state: dict[str, Any]) -> None:
        found = await self._kinds.find_record()
        if found is None:
            raise Refused("this process has no complete offloaded state", where=self._process)
        _, record = found
        if any(record.get(key) != saved_state[key] for key in SHARED_STATE_KEYS):
            raise Refused(
                "the offloaded state of this process belongs to another step", where=self._process
            )
        await self._kinds.resume(record)
        await self._kinds.run(partial(self._rank.learner.resume_from_counts, saved_state["counts"]))


TIER_TIMEOUT_S = 600.0  # for rank 0 to bring all ranks to a tier
POLL_S = 0.05  # between two checks of the tier
FETCH_TIMEOUT_S = STATE_TRANSFER_TIMEOUT_S - 60.0  # for this rank's rows of a hybrid's gradient
DISCARD_TIMEOUT_S = 10.0  # for rank 0 to order, after that, that offloaded state may be discarded


class RankActor(KindCallsMixin):
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
        self._is_time_sliced = placement.time_sliced
        self.kinds = KindController(
            mesh,
            rank.make_kinds(),
            partial(self._thread.run, deadline_s=STATE_TRANSFER_TIMEOUT_S),
            *mesh.settings.offload_targets,
            is_time_sliced=lambda: self._is_time_sliced,
        )
        self._rows = SleepingRows(rank, self.kinds, mesh.name)

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
        self._is_time_sliced = desired.time_sliced
        self.kinds.set_targets(desired.segment_owner, desired.offload_dir)
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
        stored_bytes = self.kinds.stored_bytes
        return TierUsage(
            self.kinds.accelerator_bytes, stored_bytes[Tier.MEMORY], stored_bytes[Tier.DISK]
        )

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
    async def begin_step(self, order: orders.BeginStep) -> None:
        async with self._execute(BEGIN, order.generation):
            self._rank.begin_step(order.block_rounds, order.gradient_dtype)
            self.kinds.forget_tensors(GRADIENTS)
        self._fetched_rows = {}

    @call(Ranks.compute_round)
    async def compute_round(self, part: orders.ComputeRound) -> orders.RoundStats:
        bins = [Bin.from_arrays(bin) for bin in part.bins]
        async with self._execute(TRAIN, part.generation):
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
            async with self._execute(ADD, order.generation):
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
        about = update.rounds, update.denominator, update.lr_factor
        async with self._execute(UPDATE, update.generation):
            norm = await self._thread.run(
                self._rank.apply_gradient, *about, deadline_s=COMPUTE_TIMEOUT_S
            )
        return norm

    @call(Ranks.score_bin)
    async def score(self, part: orders.ScoreBin) -> orders.BinScores:
        bin = Bin.from_arrays(part.bin)
        async with self._execute(SCORE, part.generation):
            return orders.BinScores(
                await self._thread.run(
                    self._rank.score, bin, part.quantity, deadline_s=COMPUTE_TIMEOUT_S
                )
            )

    @call(Ranks.stage_rows)
    async def stage(self, order: orders.StageRows) -> None:
        async with self._execute(SYNC, order.generation):
            await self._row_stager.stage(order)

    @call(Ranks.finish_staging)
    async def finish_staging(self, order: orders.FinishStaging) -> orders.StagingResult:
        self._check_generation(order.generation)
        return await self._row_stager.finish(order)

    @call(Ranks.save_rows)
    async def save(self, order: orders.SaveRows) -> orders.RankFault:
        async with self._execute(SAVE, order.generation):
            return await self._row_saver.save(order)

    @call(Ranks.finish_saving)
    async def finish_saving(self, order: orders.FinishSaving) -> orders.SavingResult:
        self._check_generation(order.generation)
        return await self._row_saver.finish(order)

    @call(Ranks.restore_rows)
    async def restore(self, order: orders.RestoreRows) -> orders.RestoreResult:
        async with self._execute(LOAD, order.generation):
            return await self._row_restorer.restore(order)

    @call(Ranks.load_weights)
    async def load_weights(self, order: orders.LoadWeightRows) -> None:
        async with self._execute(LOAD, order.generation):
            await self._thread.run(
                self._rank.learner.scatter_weights,
                order.tensor_names,
                None,
                deadline_s=self._rank.state_timeout_s,
            )

    @asynccontextmanager
    async def _execute(self, kind: PieceKind, generation: int) -> AsyncIterator[None]:
        """Enter to execute an order of this group with the kinds of a piece."""
        self._check_generation(generation)
        async with self.kinds.use_kinds(kind.tensor_kinds, kind.changed_kinds):
            self._check_generation(generation)  # the group may have changed while kinds moved
            yield

    def _check_generation(self, generation: int) -> None:
        if generation != self._generation:
            raise self._make_fenced_error(generation)

    def _make_fenced_error(self, generation: int) -> Fenced:
        return Fenced(
            f"an order has generation {generation}, but this rank has {self._generation}",
            where=self._mesh.name,
        )
