"""Collector of a step's gradients from the core and from hybrids that lease rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from meshrl.common.api.trainer import RoundLease, RoundRequest, RoundResult
from meshrl.common.base.errors import DeadlineExceeded, Refused
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.kernels.bin_cost import CostCalibration
from meshrl.services.trainer.bins.division import RoundBins
from meshrl.services.trainer.compute.gradient_transfer import fetch_gradient, make_hybrid_name
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.hybrids.membership import HybridMembership
from meshrl.services.trainer.hybrids.round_board import RoundBoard
from meshrl.services.trainer.learner.stats import BinStats

ROUND_TIMEOUT_FACTOR = 5.0  # a lease may take this many times as long as an average round
MIN_ROUND_TIMEOUT_S = 1.0
MAX_LEASE_WAIT_S = 10.0  # maximum wait of a hybrid's request while no round is available
RATE_WEIGHT = 0.1  # a new bin's share in the mean rate of its class
POLL_S = 5.0  # between two checks of the core while it waits for rounds


class UpdateRounds:
    def __init__(self, manifest: str, epoch: str) -> None:
        self.manifest, self.epoch = manifest, epoch
        self.board = RoundBoard()
        self.rounds: list[RoundBins] = []
        self.stats: dict[int, BinStats] = {}


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
        self._bulk = BulkClient(mesh)
        self._bin_deadline_s = bin_deadline_s
        self.costs = costs
        self.busy_s: dict[str, float] = {}  # by instance
        self.work_s = 0.0  # per worker, over all updates
        self._bin_rates: dict[int, float] = {}  # mean tokens/s, by powers of two of bin size
        self._update: UpdateRounds | None = None
        self._round_available = asyncio.Event()  # a round may be available for a hybrid
        self._progress = asyncio.Event()  # a round or result for the core
        self._round_s = 0.0  # moving average of a round's time
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

    async def lease_round(self, request: RoundRequest) -> RoundLease | None:
        """Return a hybrid's next round or weights, None if neither comes in time, or Fenced."""
        clock = self._mesh.clock
        deadline = clock.monotonic() + min(request.wait_s, MAX_LEASE_WAIT_S)
        while (lease := self._try_lease_round(request)) is None and clock.monotonic() < deadline:
            self._round_available.clear()
            try:
                async with clock.timeout(
                    max(0.001, deadline - clock.monotonic()), "waiting for a round"
                ):
                    await self._round_available.wait()
            except DeadlineExceeded:
                return None
        return lease

    def _try_lease_round(self, request: RoundRequest) -> RoundLease | None:
        work, now = self._update, self._mesh.clock.monotonic()
        manifest = self._current_manifest if work is None else work.manifest
        helper, has = request.instance, request.manifest
        index = None
        may = (
            self.hybrids.can_lease_round(helper, request.generation, has, manifest, now)
            and not self.is_asleep
        )
        if may and work is not None:
            # A hybrid computes in sequence what ranks compute in parallel.
            patience_s = (
                ROUND_TIMEOUT_FACTOR * self._compute.division.bins_per_round * self._round_s
            )
            patience_s = min(max(MIN_ROUND_TIMEOUT_S, patience_s), self._bin_deadline_s)
            index = work.board.lease_round(helper, now + patience_s)
        if not manifest or (index is None and has == manifest):
            return None
        bins = []
        if index is not None and work is not None:
            self.hybrids.record_lease(helper)
            bins = [bin.to_arrays() for bin in work.rounds[index]]
        return RoundLease(
            update_id=work.epoch if work is not None else "",
            index=-1 if index is None else index,
            manifest=manifest,
            bins=bins,
        )

    def _release_rounds(self, instance: str) -> None:
        if self._update is not None and self._update.board.release_rounds(instance):
            self._round_available.set()
            self._progress.set()

    async def accept_result(self, result: RoundResult) -> None:
        """Count a hybrid's result if it is the first in time; Fenced if its join has ended."""
        self.hybrids.record_result(result.instance, result.generation, self._mesh.clock.monotonic())
        work = self._update
        if work is None or result.update_id != work.epoch:
            return
        if self.is_asleep:
            self._release_rounds(result.instance)
            raise Refused("the core sleeps", where=self._mesh.name, fix="Request a round again")
        stats = BinStats(**result.stats)
        self._count_time(result.instance, result.busy_s)
        if not work.board.claim_result(result.index):
            return
        try:
            about = make_hybrid_name(result.instance), result.chunks, self._compute.parameter_count
            gradient = await fetch_gradient(self._mesh, self._bulk, *about)
            if self._update is not work:  # the core has computed it in the meantime
                return
            await self._compute.add_gradient(result.index, gradient)
        except BaseException:
            work.board.release_claim(result.index)
            raise
        else:
            work.stats[result.index] = stats
            work.board.complete_round(result.index)
        finally:
            self._round_available.set()
            self._progress.set()

    # -- the core --------------------------------------------------------------------------------

    def announce_weights(self, manifest: str) -> None:
        """Announce the weights that the next step begins with to hybrids."""
        self._current_manifest = manifest
        self.hybrids.require_weights(manifest)
        self._round_available.set()

    async def begin_update(self, manifest: str) -> None:
        """Begin an update, whose rounds need the weights of `manifest`."""
        self.hybrids.require_weights(manifest)
        await self._compute.begin_step()
        for silent in self.hybrids.remove_silent(self._mesh.clock.monotonic()):
            self._release_rounds(silent)
        self._update_count += 1
        self._update = UpdateRounds(manifest, f"{self._mesh.incarnation}/{self._update_count}")
        self._round_available.set()  # hybrids fetch the weights while rounds are still to come

    def offer_rounds(self, rounds: Sequence[RoundBins]) -> None:
        work = self._require_update()
        work.rounds += rounds
        work.board.add_rounds(len(rounds))
        self._round_available.set()
        self._progress.set()

    def close_rounds(self) -> None:
        self._require_update().board.is_closed = True
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
        return sum((work.stats[i] for i in range(work.board.round_count)), BinStats())

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
        self._round_s = compute_s if not self._round_s else 0.8 * self._round_s + 0.2 * compute_s
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
        if update.board.complete_round(round_index):
            update.stats[round_index] = stats
            self._round_available.set()

    def _count_time(self, instance: str, seconds: float, workers: int = 1) -> None:
        self.busy_s[instance] = self.busy_s.get(instance, 0.0) + seconds
        self.work_s += seconds * workers
