"""Gathers the gradient of a step, by the core and by hybrids that lease rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from meshrl.common.api.trainer import RoundLease, RoundRequest, RoundResult
from meshrl.common.base.errors import DeadlineExceeded, Refused
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.kernels.cost import Calibration
from meshrl.services.trainer.arithmetic.stats import BinStats
from meshrl.services.trainer.bins.division import Round
from meshrl.services.trainer.compute.gradient_transfer import collect, hybrid_name
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.hybrids.membership import HybridMembership
from meshrl.services.trainer.hybrids.round_board import RoundBoard

PATIENT_ROUNDS = 5.0  # a leased round may take this many times as long as rounds take on average
LEAST_ROUND_S = 1.0
LONGEST_HOLD_S = 10.0  # longest wait of a hybrid's request while there is no round
RATE_WEIGHT = 0.1  # a new bin's share in the mean rate of its class
LOOK_S = 5.0  # how long the core waits for rounds before it looks again


class UpdateRounds:
    def __init__(self, manifest: str, epoch: str) -> None:
        self.manifest, self.epoch = manifest, epoch
        self.board = RoundBoard()
        self.rounds: list[Round] = []
        self.stats: dict[int, BinStats] = {}


class Gradients:
    """Offers the rounds of one update at a time; `busy_s` says who spent how long on them."""

    def __init__(
        self, mesh: Mesh, compute: Compute, helper: str, bin_deadline_s: float, costs: Calibration
    ) -> None:
        """`costs` learns from what the core computes."""
        self._mesh, self._compute, self._core = mesh, compute, helper
        self._bulk = BulkClient(mesh)
        self._bin_deadline_s = bin_deadline_s
        self.costs = costs
        self.busy_s: dict[str, float] = {}  # by helper
        self.work_s = 0.0  # of each worker of all together, over all updates
        self._rates: dict[int, float] = {}  # mean tokens a second, by powers of two of a bin's
        self._work: UpdateRounds | None = None
        self._offered = asyncio.Event()  # there may be a round for a hybrid
        self._progress = asyncio.Event()  # something to look at for the core
        self._round_s = 0.0  # moving average of a round's time
        self._begun = 0  # updates, repeated ones among them: a result counts in its own alone
        self.hybrids = HybridMembership()
        self.asleep = False  # no round is given, and none is taken
        # seconds for which the core has slept, and waited for its turns, so far
        self.idle_s: Callable[[], float] = float
        # when the core began a round, and how long that took, seconds
        self.timed: Callable[[float, float], None] = lambda began, took: None
        self._current = ""  # manifest of the weights that the next step begins with

    @property
    def rates(self) -> dict[str, float]:
        """Tokens a second that the core trains bins at, by the fewest tokens of their class."""
        return {str(size): round(self._rates[size], 1) for size in sorted(self._rates)}

    # -- hybrids ---------------------------------------------------------------------------------

    def joined(self, helper: str) -> int:
        now = self._mesh.clock.monotonic()
        for silent in [helper, *self.hybrids.silent(now)]:
            self._free(silent)
        return self.hybrids.join(helper, now)

    def left(self, helper: str, generation: int) -> None:
        if self.hybrids.leave(helper, generation):
            self._free(helper)

    async def lease(self, request: RoundRequest) -> RoundLease | None:
        """Return a hybrid's next round or weights, None for neither in time; or Fenced."""
        clock = self._mesh.clock
        deadline = clock.monotonic() + min(request.wait_s, LONGEST_HOLD_S)
        while (lease := self._lease(request)) is None and clock.monotonic() < deadline:
            self._offered.clear()
            try:
                async with clock.timeout(max(0.001, deadline - clock.monotonic()), "a round"):
                    await self._offered.wait()
            except DeadlineExceeded:
                return None
        return lease

    def _lease(self, request: RoundRequest) -> RoundLease | None:
        work, now = self._work, self._mesh.clock.monotonic()
        wanted = self._current if work is None else work.manifest
        helper, has = request.helper, request.manifest
        index = None
        may = self.hybrids.asks(helper, request.generation, has, wanted, now) and not self.asleep
        if may and work is not None:
            # A hybrid computes one after the other what ranks do at once.
            patience_s = PATIENT_ROUNDS * self._compute.division.bins * self._round_s
            patience_s = min(max(LEAST_ROUND_S, patience_s), self._bin_deadline_s)
            index = work.board.lease(helper, now + patience_s)
        if not wanted or (index is None and has == wanted):
            return None
        bins = []
        if index is not None and work is not None:
            self.hybrids.leased(helper)
            bins = [bin.to_arrays() for bin in work.rounds[index]]
        return RoundLease(
            epoch=work.epoch if work is not None else "",
            index=-1 if index is None else index,
            manifest=wanted,
            bins=bins,
        )

    def _free(self, helper: str) -> None:
        if self._work is not None and self._work.board.release(helper):
            self._offered.set()
            self._progress.set()

    async def done(self, result: RoundResult) -> None:
        """Count a hybrid's result, if it is the first in time; Fenced if it is one no more."""
        self.hybrids.gives(result.helper, result.generation, self._mesh.clock.monotonic())
        work = self._work
        if work is None or result.epoch != work.epoch:
            return
        if self.asleep:
            self._free(result.helper)
            raise Refused("the core sleeps", where=self._mesh.name, fix="ask for a round again")
        stats = BinStats(**result.stats)
        self._spent(result.helper, result.busy_s)
        if not work.board.claim(result.index):
            return
        try:
            about = hybrid_name(result.helper), result.pieces, self._compute.size
            gradient = await collect(self._mesh, self._bulk, *about)
            if self._work is not work:  # the core has computed it meanwhile
                return
            await self._compute.keep(result.index, gradient)
        except BaseException:
            work.board.disclaim(result.index)
            raise
        else:
            work.stats[result.index] = stats
            work.board.done(result.index)
        finally:
            self._offered.set()
            self._progress.set()

    # -- the core --------------------------------------------------------------------------------

    def announce(self, manifest: str) -> None:
        """Have hybrids fetch the weights that the next step begins with."""
        self._current = manifest
        self.hybrids.wanted(manifest)
        self._offered.set()

    async def begin(self, manifest: str) -> None:
        """An update's rounds are offered from now on, to be computed with `manifest`'s weights."""
        self.hybrids.wanted(manifest)
        await self._compute.begin()
        for silent in self.hybrids.silent(self._mesh.clock.monotonic()):
            self._free(silent)
        self._begun += 1
        self._work = UpdateRounds(manifest, f"{self._mesh.incarnation}/{self._begun}")
        self._offered.set()  # hybrids fetch the weights while rounds are still to come

    def offer(self, rounds: Sequence[Round]) -> None:
        work = self._at_work()
        work.rounds += rounds
        work.board.grow(len(rounds))
        self._offered.set()
        self._progress.set()

    def close(self) -> None:
        self._at_work().board.closed = True
        self._progress.set()

    async def run(self) -> BinStats:
        """Computes what hybrids do not, until all rounds of the closed board are there."""
        work = self._at_work()
        try:
            while not work.board.complete:
                self._progress.clear()
                index = work.board.take(self._mesh.clock.monotonic())
                if index is None:
                    # Until a round or a result comes, or a hybrid's lease runs out.
                    expiry, now = work.board.next_expiry(), self._mesh.clock.monotonic()
                    left_s = LOOK_S if expiry is None else min(LOOK_S, max(0.01, expiry - now))
                    with suppress(DeadlineExceeded):
                        async with self._mesh.clock.timeout(left_s, "rounds"):
                            await self._progress.wait()
                else:
                    await self._own(work, index)
        finally:
            self._work = None
        return sum((work.stats[i] for i in range(work.board.count)), BinStats())

    def _at_work(self) -> UpdateRounds:
        assert self._work is not None, "no update has begun"
        return self._work

    async def _own(self, work: UpdateRounds, index: int) -> None:
        clock = self._mesh.clock
        started = clock.monotonic()
        began = started - self.idle_s()
        stats = await self._compute.compute(index, work.rounds[index])
        took = clock.monotonic() - self.idle_s() - began
        self.timed(started, clock.monotonic() - started)
        self._round_s = took if not self._round_s else 0.8 * self._round_s + 0.2 * took
        self._spent(self._core, took, len(work.rounds[index]))
        lengths = [bin.lengths.tolist() for bin in work.rounds[index]]
        for one in lengths if took > 0 else ():
            tokens = sum(one)
            if tokens:
                size = 1 << (tokens.bit_length() - 1)
                mean = self._rates.get(size, tokens / took)
                self._rates[size] = mean + RATE_WEIGHT * (tokens / took - mean)
        self.costs.learn(max(lengths, key=self.costs.cost().of), took)  # the others wait for it
        if work.board.done(index):
            work.stats[index] = stats
            self._offered.set()

    def _spent(self, helper: str, seconds: float, workers: int = 1) -> None:
        self.busy_s[helper] = self.busy_s.get(helper, 0.0) + seconds
        self.work_s += seconds * workers
