"""Arithmetic of a core on a gang of ranks: this process is rank 0 and orders the others.

An order runs on all ranks at once; see `RankGroup`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.api.ranks import (
    COMPUTE_TIMEOUT_S,
    STATE_TRANSFER_TIMEOUT_S,
    UPDATE_SETTINGS_TIMEOUT_S,
    AddGradient,
    ApplyGradient,
    BeginStep,
    ComputeRound,
    FetchGradient,
    LoadWeightRows,
    Ranks,
    RestoreRows,
    ScoreBin,
    SleepOrder,
    UpdateSettings,
)
from meshrl.common.base.errors import (
    BadMessage,
    CorruptData,
    MeshError,
    Refused,
    StateUnavailable,
    StorageFull,
)
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.mesh.instances.kind_controller import KindController
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.task_groups import run_first
from meshrl.common.state import registry
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.chunk_builder import StagingOptions
from meshrl.common.weights.staging import VersionStager
from meshrl.common.weights.transports.rendezvous import rendezvous_directory
from meshrl.services.trainer.bins.division import RoundBins
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.compute.gradient_transfer import fetch_gradient
from meshrl.services.trainer.compute.piece_runner import (
    ADD,
    BEGIN,
    CHANGE,
    GRADIENTS,
    LOAD,
    SCORE,
    TRAIN,
    UPDATE,
    PieceRunner,
    run_as_piece,
)
from meshrl.services.trainer.gang.rank_group import RankGroup
from meshrl.services.trainer.gang.state_writers import (
    GangStaging,
    GangStateWriter,
    LocalStateWriter,
)
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.learner.stats import BinStats
from meshrl.services.trainer.ranks.rank import Rank, make_filler_bin
from meshrl.services.trainer.ranks.rank_faults import (
    READ_FAULTS,
    raise_first,
    run_and_report,
)
from meshrl.services.trainer.rows.row_filling import make_row_filler
from meshrl.services.trainer.rows.saved_rows import SavedRows

T = TypeVar("T")

POLL_S = 1.0  # between two checks whether a rank has exited

_restore_numbers = itertools.count(1)
_transfer_ids = itertools.count(1)  # of hybrids' gradients


class GangCompute:
    """Gradients of rounds, retained until `apply_gradient`; `form_group` comes first."""

    def __init__(
        self,
        mesh: Mesh,
        job: str,
        rank: Rank,
        runner: PieceRunner | None = None,
        rendezvous_dir: Path | None = None,
        collective_timeout_s: float = COMPUTE_TIMEOUT_S,
    ) -> None:
        """Create the compute of a core.

        Args:
            rendezvous_dir: Directory of the ranks' rendezvous; None: the host's default.
            collective_timeout_s: Deadline of the ranks' collectives.
        """
        rendezvous_dir = rendezvous_dir or rendezvous_directory(mesh.settings)
        self.runner = runner or PieceRunner(mesh)
        self.division = rank.division
        self._mesh, self._rank = mesh, rank
        self._bulk = BulkClient(mesh)
        about = mesh, job, rank, rendezvous_dir, collective_timeout_s
        self._group = RankGroup(*about, on_loss=self._on_group_lost)
        self._step_count = 0  # begun so far: a hybrid's gradient counts only in its own step
        self.kinds = KindController(
            mesh,
            rank.make_kinds(),
            self._run_blocking,
            *mesh.settings.offload_targets,
            is_time_sliced=lambda: self.runner.time_slices.is_enabled,
        )
        self.runner.tensor_kinds = self.kinds
        self._saved_state: dict[str, Any] = {}  # description of the offloaded state

    @property
    def local_learner(self) -> Learner | None:
        return None if self._group.other_ranks else self._rank.learner

    @property
    def parameter_count(self) -> int:
        return self._rank.learner.parameter_count

    def list_owned_ranges(self) -> list[NDArray[np.int64]]:
        """Return the ranges [count, 2] of a flat gradient that each rank owns."""
        return [self._rank.learner.list_owned_ranges(rank) for rank in range(self._rank.ranks)]

    @property
    def late_counts(self) -> Mapping[str, int]:
        """Counts of emulated pieces: `paced` so far, and `late` ones; empty without emulation."""
        return self.runner.late_counts or self._rank.late_counts

    async def form_group(self) -> None:
        """Form the group of all ranks, first or after RankLost; weights must then be loaded."""
        async with self.runner.rebuild_state():
            await self._group.form()  # it waits minutes for ranks if necessary

    def _on_group_lost(self) -> None:
        self.kinds.reset()

    # -- orders ----------------------------------------------------------------------------------

    @run_as_piece(BEGIN)
    async def begin_step(self, block_rounds: int = 1, gradient_dtype: str = "float32") -> None:
        """Begin a step, first or again, without any retained gradient."""
        self._step_count += 1
        about = block_rounds, gradient_dtype
        orders = self._group.repeat_order(BeginStep(self._group.require_generation(), *about))
        self._rank.begin_step(*about)
        self.kinds.forget_tensors(GRADIENTS)
        await self._group.run_guarded(self._group.call_all(Ranks.begin_step, orders))

    @run_as_piece(TRAIN)
    async def compute_round(self, index: int, bins: RoundBins) -> BinStats:
        """Compute and retain the gradient sum of a round's bins; return their statistics."""
        like = next((bin for bin in bins if bin.loss_token_count), bins[0])
        own, *rest = self.division.assign_bins(
            [bin if bin.loss_token_count else make_filler_bin(like) for bin in bins]
        )
        generation = self._group.require_generation()
        parts = [ComputeRound(generation, index, [bin.to_arrays() for bin in of]) for of in rest]
        here, others = await self._group.run_on_all(
            COMPUTE_TIMEOUT_S, Ranks.compute_round, parts, self._rank.compute_round, index, own
        )
        found = [*here, *(BinStats(**stats) for other in others for stats in other.stats)]
        counted = (stats for stats, bin in zip(found, bins, strict=True) if bin.loss_token_count)
        return sum(counted, BinStats())

    async def add_gradient(self, block: int, hybrid: str, chunks: Sequence[Sequence[str]]) -> None:
        """Add a hybrid's gradient of a block, of which each rank fetches its rows.

        All ranks add it or none. Raise the first error of a rank that could not fetch its rows,
        Refused if another step has begun, or RankLost.
        """
        step, generation = self._step_count, self._group.require_generation()
        transfer, add = next(_transfer_ids), self._rank.make_gradient_adder()
        sizes = [int((part[:, 1] - part[:, 0]).sum()) for part in self.list_owned_ranges()]
        if len(chunks) != len(sizes):
            raise BadMessage(f"rows of {len(chunks)} ranks for {len(sizes)}", where=hybrid)
        orders = [
            FetchGradient(generation, transfer, hybrid, size, list(digests))
            for size, digests in zip(sizes[1:], chunks[1:], strict=True)
        ]
        own, there = await asyncio.gather(
            fetch_gradient(self._mesh, self._bulk, hybrid, chunks[0], sizes[0]),
            self._group.run_guarded(self._group.call_all(Ranks.fetch_gradient, orders)),
            return_exceptions=True,
        )
        if isinstance(there, BaseException):
            raise there
        try:
            raise_first(there)
            if isinstance(own, BaseException):
                raise own
        except MeshError:
            discard = self._group.repeat_order(AddGradient(generation, transfer, -1))
            await self._group.run_guarded(self._group.call_all(Ranks.add_gradient, discard))
            raise

        async def add_on_all() -> None:
            if step != self._step_count:
                raise Refused("the step of this gradient has ended", where=self._mesh.name)
            uses = self._group.repeat_order(AddGradient(generation, transfer, block))
            run = self._mesh.host.run_blocking
            async with self.runner.use_kinds(ADD):
                await run(add, block, own, deadline_s=STATE_TRANSFER_TIMEOUT_S)
                await self._group.run_guarded(self._group.call_all(Ranks.add_gradient, uses))

        async with self.runner.gradient_lock:
            await self.runner.time_slices.run_in_slice(
                ADD.function, add_on_all, kinds=ADD.tensor_kinds
            )

    @run_as_piece(CHANGE)
    async def update_settings(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        """Replace the settings of steps until a gang is formed again."""
        order = UpdateSettings(
            self._group.require_generation(), asdict(algorithm), asdict(optimizer)
        )
        orders = self._group.repeat_order(order)
        await self._group.run_on_all(
            UPDATE_SETTINGS_TIMEOUT_S,
            Ranks.update_settings,
            orders,
            self._rank.learner.update_settings,
            algorithm,
            optimizer,
        )

    @run_as_piece(UPDATE)
    async def apply_gradient(self, rounds: int, denominator: float, lr_factor: float) -> float:
        """Apply one optimizer step from rounds 0 .. `rounds` - 1; return the unclipped norm."""
        about = rounds, denominator, lr_factor
        orders = self._group.repeat_order(ApplyGradient(self._group.require_generation(), *about))
        norm, _ = await self._group.run_on_all(
            COMPUTE_TIMEOUT_S, Ranks.apply_gradient, orders, self._rank.apply_gradient, *about
        )
        return norm

    async def score(self, bins: Sequence[Bin], quantity: str) -> list[NDArray[np.float32]]:
        """Return `logprobs` or `values` at each position of each bin, 0 where untrained."""
        found: list[NDArray[np.float32]] = []
        at_once = self.division.bins_per_score
        for start in range(0, len(bins), at_once):
            found += await self._score_round(bins[start : start + at_once], quantity)
        return found

    @run_as_piece(SCORE)
    async def _score_round(self, bins: Sequence[Bin], quantity: str) -> list[NDArray[np.float32]]:
        own, *rest = [*bins, *[make_filler_bin(bins[0])] * (self._rank.ranks - len(bins))]
        generation = self._group.require_generation()
        parts = [ScoreBin(generation, bin.to_arrays(), quantity) for bin in rest]
        here, others = await self._group.run_on_all(
            COMPUTE_TIMEOUT_S, Ranks.score_bin, parts, self._rank.score, own, quantity
        )
        return [here, *(other.scores for other in others)][: len(bins)]

    @property
    def meta_tensors(self) -> Mapping[str, Tensor]:
        return self._rank.learner.get_meta_tensors(False)

    def create_staging(self, options: StagingOptions, description: str) -> GangStaging:
        """Return a staging of all ranks' weights as they are when copied; RankLost without a
        gang.
        """
        stager = VersionStager(self._mesh, self._bulk, options, description)
        return GangStaging(self.runner, self._group, self._rank, stager, options, description)

    def create_saver(self, path: Path, include_masters: bool) -> LocalStateWriter | GangStateWriter:
        """Return the writer of a checkpoint's state below `path`, as it is when copied.

        The state is all that the next step depends on beside the weights, and with
        `include_masters` the float32 weights. Raise RankLost without a gang.
        """
        if (learner := self.local_learner) is not None:
            return LocalStateWriter(learner, self.runner, self._run_blocking, path, include_masters)
        return GangStateWriter(
            self._mesh, self.runner, self._group, self._rank, path, include_masters
        )

    @run_as_piece(LOAD)
    async def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load full weights for all parameters, and reset the optimizer."""
        names = list(weights)
        orders = self._group.repeat_order(LoadWeightRows(self._group.require_generation(), names))
        await self._group.run_on_all(
            self._rank.state_timeout_s,
            Ranks.load_weights,
            orders,
            self._rank.learner.scatter_weights,
            names,
            weights,
        )

    @run_as_piece(LOAD)
    async def restore(self, name: str, files: dict[str, str], manifest: str, path: Path) -> None:
        """Restore a checkpoint whose state is below `path`.

        Weights that the state lacks come from the version of `manifest`. Raise CorruptData or
        NotFound if the store does not hold that version intact; the caller must then restore again.
        """
        host = self._mesh.settings.host
        number = next(_restore_numbers)
        order = RestoreRows(self._group.require_generation(), number, host, name, files, manifest)
        run = self._mesh.host.run_blocking
        saved = await run(SavedRows, path, deadline_s=STATE_TRANSFER_TIMEOUT_S)
        own = self._rank.learner.get_rows(self._rank.learner.get_meta_tensors(False))
        fill = await make_row_filler(self._mesh, self._bulk, manifest, saved, own)
        orders = self._group.repeat_order(order)
        restore = partial(run_and_report, READ_FAULTS, self._rank.learner.restore, saved, fill)
        here, there = await self._group.run_on_all(
            self._rank.state_timeout_s, Ranks.restore_rows, orders, restore
        )
        raise_first([here, *(answer.fault for answer in there)])

    # -- sleep: every rank offloads its own rows, all of them or none ------------------------------

    async def sleep(self, describe_state: Callable[[], dict[str, Any]], tier: Tier) -> None:
        """Offload all ranks' state with `describe_state()` and free its memory, or undo all."""
        async with self.runner.enter_sleep():
            state = describe_state() | {"counts": self._rank.learner.get_counts()}
            try:
                await gather_all(self._save_own_rows(tier, state), self._order_ranks("keep", state))
            except BaseException:
                with suppress(MeshError):
                    await self._order_ranks("discard", state)
                await self.kinds.drop_copies()
                raise
            await self._group.run_guarded(self._order_ranks("release", state))
            await self.kinds.offload(tier)
            self._saved_state = state

    async def _save_own_rows(self, tier: Tier, state: Mapping[str, Any]) -> None:
        await self.kinds.write_back(tier)
        await self.kinds.save_record(tier, state)

    async def wake(self) -> None:
        """Load all ranks' state.

        Raises:
            CorruptData: The offloaded state is corrupt. All pieces, waiting or later, then raise
                RankLost until the group is formed again.
            Other errors: The core stays asleep.
        """
        async with self.runner.exit_sleep():
            about = self._saved_state
            try:
                await gather_all(self.kinds.load(), self._order_ranks("take", about))
            except BaseException as error:
                sleeps_on = Refused, StorageFull, StateUnavailable
                has_lost_ranks = self._group.other_ranks and not isinstance(error, sleeps_on)
                if not isinstance(error, MeshError if has_lost_ranks else CorruptData):
                    await self._order_ranks("release", about)  # all ranks stay asleep
                    await self.kinds.offload(Tier(about["tier"]))
                    raise
                lost = await self._group.handle_loss(error)
                raise CorruptData(str(lost), where=self._mesh.name) from error
            with suppress(MeshError):
                await self._order_ranks("forget", about)

    async def move(self, tier: Tier) -> None:
        """Move all ranks' offloaded state to a tier; repeated calls change nothing.

        Tier `absent` prepares the ranks' removal. Tier `accelerator` cancels that.
        """
        about = self._saved_state | {"tier": tier}
        if tier != Tier.ABSENT:
            await self._order_ranks("move", about)
            if tier != Tier.ACCELERATOR:
                await self.kinds.move_copies(tier)
                self._saved_state = about
            return
        order = self._build_order("move", about)
        # Each rank has answered by then, or has exited: it may exit once it has received the order.
        ends = [
            run_first(
                [other.call(Ranks.execute_sleep_order, order), self._wait_until_exited(other.name)]
            )
            for other in self._group.other_ranks
        ]
        await gather_all(*ends)

    async def _wait_until_exited(self, name: str) -> None:
        while True:
            await self._mesh.clock.sleep(POLL_S)
            with suppress(StateUnavailable):
                entry = await registry.lookup(self._mesh.state, name)
                if entry is None or not entry.alive:
                    return

    @run_as_piece(CHANGE)
    async def resume(self, saved_state: Mapping[str, Any]) -> bool:
        """Resume from another process's offloaded state; return False if it is unusable here."""
        state = dict(saved_state)
        try:
            await gather_all(self.kinds.resume(state), self._order_ranks("resume", state))
        except MeshError as error:
            self._mesh.telemetry.log.warning(
                "offloaded state could not be resumed", error=str(error)
            )
            return False
        finally:
            with suppress(MeshError):
                await self._order_ranks("forget", state)
        await self._run_blocking(self._rank.learner.resume_from_counts, saved_state["counts"])
        return True

    async def _order_ranks(self, action: str, state: dict[str, Any]) -> None:
        """Send a sleep order to all other ranks; raise the first error of any."""
        order = self._build_order(action, state)
        await gather_all(
            *(other.call(Ranks.execute_sleep_order, order) for other in self._group.other_ranks)
        )

    async def _run_blocking(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` on the thread of this rank's arithmetic and return its result."""
        return await self._group.rank_thread.run(work, *args, deadline_s=STATE_TRANSFER_TIMEOUT_S)

    def _build_order(self, action: str, state: dict[str, Any]) -> SleepOrder:
        return SleepOrder(self._group.require_generation(), action, state["tier"], state)


async def gather_all(*awaitables: Awaitable[Any]) -> None:
    """Wait for all awaitables; raise the first error of any."""
    found = await asyncio.gather(*awaitables, return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException):
            raise error
