"""Collector of a step's gradients from the core and from hybrids that lease rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from meshrl.common.api.trainer import BlockResult, RoundLease, RoundRequest
from meshrl.common.base.errors import DeadlineExceeded, Refused
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.kernels.bin_cost import CostCalibration
from meshrl.services.trainer.bins.division import RoundBins
from meshrl.services.trainer.compute.gradient_transfer import make_hybrid_name
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.hybrids.block_sizes import choose_block_rounds
from meshrl.services.trainer.hybrids.membership import HybridMembership
from meshrl.services.trainer.hybrids.round_board import RoundBoard
from meshrl.services.trainer.learner.stats import BinStats

ROUND_TIMEOUT_FACTOR = 5.0  # a lease may take this many times as long as an average round
MIN_ROUND_TIMEOUT_S = 1.0
MAX_LEASE_WAIT_S = 10.0  # maximum wait of a hybrid's request while no round is available
RATE_WEIGHT = 0.1  # a new bin's share in the mean rate of its class
POLL_S = 5.0  # between two checks of the core while it waits for rounds


MEAN_WEIGHT = 0.2  # a new measurement's share in a moving average
MIN_TRANSFER_BYTES_PER_S = 200e6  # of a hybrid, before a transfer was measured
TRANSFER_TIMEOUT_FACTOR = 5.0  # a transfer may take this many times as long as an average one


class UpdateRounds:
    def __init__(self, manifest: str, epoch: str, block_rounds: int, gradient_dtype: str) -> None:
        self.manifest, self.epoch, self.gradient_dtype = manifest, epoch, gradient_dtype
        self.board = RoundBoard(block_rounds)
        self.rounds: list[RoundBins] = []
        self.stats: dict[int, BinStats] = {}  # by block
        # acceptances of hybrids' sums: they go on when a hybrid's call is cancelled
        self.arrivals: set[asyncio.Task[None]] = set()


class GradientCollector:
    """Collector that leases the rounds of one update; `busy_s` has compute seconds by instance."""

    def __init__(
        self,
        mesh: Mesh,
        compute: GangCompute,
        core_instance: str,
        bin_deadline_s: float,
        costs: CostCalibration,
    ) -> None:
        """Create a collector; the core's measurements calibrate `costs`."""
        self._mesh, self._compute, self._core_instance = mesh, compute, core_instance
        self._bin_deadline_s = bin_deadline_s
        self.costs = costs
        self.busy_s: dict[str, float] = {}  # by instance
        self.work_s = 0.0  # per worker, over all updates
        self._bin_rates: dict[int, float] = {}  # mean tokens/s, by powers of two of bin size
        self._update: UpdateRounds | None = None
        self._round_available = asyncio.Event()  # a round may be available for a hybrid
        self._progress = asyncio.Event()  # a round or result for the core
        self._round_s = 0.0  # moving average of a round's time
        self._hybrid_round_s = 0.0  # the same, at hybrids
        # moving average of the seconds from a hybrid's sum until the ranks have it
        self.transfer_s = 0.0
        self._last_round_count = 0  # of the last update
        # updates, also repeated ones: a result counts only in its own update
        self._update_count = 0
        self.hybrids = HybridMembership()
        self.is_asleep = False  # no round is leased, and no result accepted
        # seconds so far in which the core slept or waited for time slices
        self.measure_idle_s: Callable[[], float] = float
        # monotonic start of a round that the core computed, and its duration; seconds
        self.on_round_computed: Callable[[float, float], None] = lambda began, took: None
        self._current_manifest = ""  # of the weights that the next step begins with

    @property
    def bin_tokens_per_s(self) -> dict[str, float]:
        """Tokens per second of the core's bins, by the minimum tokens of their size class."""
        return {str(size): round(self._bin_rates[size], 1) for size in sorted(self._bin_rates)}

    # -- hybrids ---------------------------------------------------------------------------------

    def add_hybrid(self, instance: str) -> int:
        now = self._mesh.clock.monotonic()
        for silent in [instance, *self.hybrids.remove_silent(now)]:
            self._release_rounds(silent)
        return self.hybrids.join(instance, now)

    def remove_hybrid(self, instance: str, generation: int) -> None:
        if self.hybrids.leave(instance, generation):
            self._release_rounds(instance)

    async def lease_round(self, request: RoundRequest) -> RoundLease:
        """Return a hybrid's next round or weights, or an empty lease if neither comes in time.

        Raise Fenced if the hybrid's join has ended.
        """
        clock = self._mesh.clock
        deadline = clock.monotonic() + min(request.wait_s, MAX_LEASE_WAIT_S)
        while (
            lease := self._try_lease_round(request, deadline)
        ) is None and clock.monotonic() < deadline:
            self._round_available.clear()
            with suppress(DeadlineExceeded):
                async with clock.timeout(
                    max(0.001, deadline - clock.monotonic()), "waiting for a round"
                ):
                    await self._round_available.wait()
        update_id = "" if self._update is None else self._update.epoch
        return lease or RoundLease(update_id=update_id, index=-1, manifest="", bins=[])

    def _try_lease_round(self, request: RoundRequest, waits_until: float) -> RoundLease | None:
        work, now = self._update, self._mesh.clock.monotonic()
        manifest = self._current_manifest if work is None else work.manifest
        helper, has = request.instance, request.manifest
        may = (
            self.hybrids.can_lease_round(helper, request.generation, has, manifest, now)
            and not self.is_asleep
        )
        if may and work is not None:
            lease = self._lease_round(work, request, waits_until)
            if lease is not None:
                self.hybrids.record_lease(helper)
                return lease
        if not manifest or has == manifest:
            return None
        update_id = "" if work is None else work.epoch
        return RoundLease(update_id=update_id, index=-1, manifest=manifest, bins=[])

    def _lease_round(
        self, work: UpdateRounds, request: RoundRequest, waits_until: float
    ) -> RoundLease | None:
        """Return the next round of the hybrid's block, or of a new one; None if there is none."""
        board, is_current = work.board, request.update_id == work.epoch
        patience_s = self._compute_patience_s()
        sent_block = request.sent_block if is_current else -1
        block = board.lease_block(request.instance, waits_until + patience_s, sent_block)
        if block is None:
            return None
        before = request.rounds_done if is_current and request.block == block else 0
        index = board.get_round(block, before)
        if index is None and not board.is_last_round(block, before):
            return None
        board.extend_lease(block, self._mesh.clock.monotonic() + patience_s)
        return RoundLease(
            update_id=work.epoch,
            index=-1 if index is None else index,
            manifest=work.manifest,
            bins=[] if index is None else [bin.to_arrays() for bin in work.rounds[index]],
            block=block,
            rounds_before=before,
            is_complete=board.is_last_round(block, before + (index is not None)),
            gradient_dtype=work.gradient_dtype,
            owned_ranges=[] if before else self._compute.list_owned_ranges(),
        )

    def _compute_patience_s(self) -> float:
        """Return the seconds within which a hybrid computes a round and stages a block's sum."""
        # A hybrid computes in sequence what ranks compute in parallel.
        patience_s = ROUND_TIMEOUT_FACTOR * self._compute.division.bins_per_round * self._round_s
        patience_s = min(max(MIN_ROUND_TIMEOUT_S, patience_s), self._bin_deadline_s)
        if not self.transfer_s:
            return patience_s + 4 * self._compute.parameter_count / MIN_TRANSFER_BYTES_PER_S
        return patience_s + TRANSFER_TIMEOUT_FACTOR * self.transfer_s

    def _release_rounds(self, instance: str) -> None:
        if self._update is not None and self._update.board.release_blocks(instance):
            self._round_available.set()
            self._progress.set()

    async def accept_result(self, result: BlockResult) -> None:
        """Add a hybrid's sum if it is the first in time; Fenced if its join has ended."""
        self.hybrids.record_result(result.instance, result.generation, self._mesh.clock.monotonic())
        work = self._update
        if work is None or result.update_id != work.epoch:
            return
        if self.is_asleep:
            self._release_rounds(result.instance)
            raise Refused("the core sleeps", where=self._mesh.name, fix="Request a round again")
        stats = BinStats(**result.stats)  # malformed ones fail before the block is claimed
        self._count_time(result.instance, result.busy_s)
        if not work.board.claim_result(result.block, result.instance, result.rounds):
            return
        arrival = asyncio.create_task(self._add_block(work, result, stats))
        arrival.add_done_callback(consume_exception)
        work.arrivals.add(arrival)
        arrival.add_done_callback(work.arrivals.discard)
        await asyncio.shield(arrival)

    async def _add_block(self, work: UpdateRounds, result: BlockResult, stats: BinStats) -> None:
        clock = self._mesh.clock
        began = clock.monotonic() - self.measure_idle_s()
        try:
            name = make_hybrid_name(result.instance)
            await self._compute.add_gradient(result.block, name, result.chunks)
        except BaseException:
            work.board.release_claim(result.block)
            raise
        else:
            transfer_s = result.staged_s + clock.monotonic() - self.measure_idle_s() - began
            self.transfer_s = _average(self.transfer_s, max(0.0, transfer_s))
            self._hybrid_round_s = _average(self._hybrid_round_s, result.busy_s / result.rounds)
            work.stats[result.block] = stats
            work.board.complete_block(result.block)
        finally:
            self._round_available.set()
            self._progress.set()

    # -- the core --------------------------------------------------------------------------------

    def announce_weights(self, manifest: str) -> None:
        """Announce the weights that the next step begins with to hybrids."""
        self._current_manifest = manifest
        self.hybrids.require_weights(manifest)
        self._round_available.set()

    def choose_block_rounds(self, rounds: int | None) -> int:
        """Choose the rounds of a block for an update of so many rounds; None: as the last one."""
        return choose_block_rounds(
            self._last_round_count if rounds is None else rounds,
            self._compute.division.bins_per_round,
            len(self.hybrids.get_stages()),
            self.transfer_s,
            self._hybrid_round_s,
        )

    async def begin_update(
        self, manifest: str, block_rounds: int = 1, gradient_dtype: str = "float32"
    ) -> None:
        """Begin an update, whose rounds need the weights of `manifest`.

        Gradients are summed by blocks of `block_rounds` rounds, and these sums are rounded to
        `gradient_dtype`.
        """
        self.hybrids.require_weights(manifest)
        await self._compute.begin_step(block_rounds, gradient_dtype)
        for silent in self.hybrids.remove_silent(self._mesh.clock.monotonic()):
            self._release_rounds(silent)
        self._update_count += 1
        epoch = f"{self._mesh.incarnation}/{self._update_count}"
        self._update = UpdateRounds(manifest, epoch, block_rounds, gradient_dtype)
        self._round_available.set()  # hybrids fetch the weights while rounds are still to come

    def offer_rounds(self, rounds: Sequence[RoundBins]) -> None:
        work = self._require_update()
        work.rounds += rounds
        work.board.add_rounds(len(rounds))
        self._round_available.set()
        self._progress.set()

    def close_rounds(self) -> None:
        self._require_update().board.close()
        self._round_available.set()  # the last block of a hybrid may be complete
        self._progress.set()

    async def compute_rounds(self) -> BinStats:
        """Compute the rounds that hybrids do not, until the closed board is complete."""
        work = self._require_update()
        try:
            while not work.board.is_complete:
                self._progress.clear()
                index = work.board.take_round(self._mesh.clock.monotonic())
                if index is None:
                    # Until a round or a result comes, or a hybrid's lease expires.
                    expiry, now = work.board.next_expiry(), self._mesh.clock.monotonic()
                    left_s = POLL_S if expiry is None else min(POLL_S, max(0.01, expiry - now))
                    with suppress(DeadlineExceeded):
                        async with self._mesh.clock.timeout(left_s, "rounds"):
                            await self._progress.wait()
                else:
                    await self._compute_own_round(work, index)
        finally:
            self._update = None
            self._last_round_count = work.board.round_count
            for arrival in list(work.arrivals):
                arrival.cancel()
            await asyncio.gather(*work.arrivals, return_exceptions=True)
        return sum((work.stats[i] for i in range(work.board.block_count)), BinStats())

    def _require_update(self) -> UpdateRounds:
        assert self._update is not None, "no update has begun"
        return self._update

    async def _compute_own_round(self, update: UpdateRounds, round_index: int) -> None:
        clock = self._mesh.clock
        started = clock.monotonic()
        began = started - self.measure_idle_s()
        stats = await self._compute.compute_round(round_index, update.rounds[round_index])
        compute_s = clock.monotonic() - self.measure_idle_s() - began
        self.on_round_computed(started, clock.monotonic() - started)
        self._round_s = _average(self._round_s, compute_s)
        self._count_time(self._core_instance, compute_s, len(update.rounds[round_index]))
        lengths = [bin.lengths.tolist() for bin in update.rounds[round_index]]
        for one in lengths if compute_s > 0 else ():
            tokens = sum(one)
            if tokens:
                size = 1 << (tokens.bit_length() - 1)
                mean = self._bin_rates.get(size, tokens / compute_s)
                self._bin_rates[size] = mean + RATE_WEIGHT * (tokens / compute_s - mean)
        # The other ranks wait for the slowest bin.
        self.costs.add_measurement(max(lengths, key=self.costs.get_cost().estimate_bin), compute_s)
        block = round_index // update.board.block_rounds
        update.stats[block] = update.stats[block] + stats if block in update.stats else stats
        update.board.complete_round(round_index)
        self._round_available.set()

    def _count_time(self, instance: str, seconds: float, workers: int = 1) -> None:
        self.busy_s[instance] = self.busy_s.get(instance, 0.0) + seconds
        self.work_s += seconds * workers


def _average(mean: float, measured: float) -> float:
    """Return the moving average `mean` after another measurement; 0: there is none before."""
    return mean + MEAN_WEIGHT * (measured - mean) if mean else measured
