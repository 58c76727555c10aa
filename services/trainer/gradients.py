"""A step's gradient: the sum over its bins, computed by the core and by hybrids that lease some."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from common.api.trainer import BinLease, BinResult
from common.errors import BadMessage, DeadlineExceeded
from common.mesh import Mesh
from services.trainer.batching import Bin
from services.trainer.bins import BinBoard
from services.trainer.learner import BinStats, Learner, add

COMPUTE_S = 3600.0  # deadline of one piece of arithmetic
PATIENT_BINS = 5.0  # a leased bin may take this many times as long as bins take on average
LEAST_BIN_S = 1.0
LONGEST_HOLD_S = 10.0  # of a hybrid's question, while there is no bin

Result = tuple[torch.Tensor, BinStats]


class StepWork:
    """The bins of the step that is being computed."""

    def __init__(self, step: int, bins: list[Bin], manifest: str) -> None:
        self.step, self.bins, self.manifest = step, bins, manifest
        self.board: BinBoard[Result] = BinBoard(len(bins))


class Gradients:
    """Offers the bins of one step at a time; `busy_s` says who spent how long on them."""

    def __init__(self, mesh: Mesh, learner: Learner, gang: str, bin_deadline_s: float) -> None:
        self._mesh, self._learner, self._gang = mesh, learner, gang
        self._bin_deadline_s = bin_deadline_s
        self.busy_s: dict[str, float] = {}  # by gang
        self._work: StepWork | None = None
        self._offered = asyncio.Event()  # there may be a bin for a hybrid
        self._progress = asyncio.Event()  # a result to look at
        self._bin_s = 0.0  # moving average of a bin's time

    async def lease(self, gang: str, wait_s: float) -> BinLease | None:
        """The next bin for a hybrid; None when none comes within `wait_s`."""
        clock = self._mesh.clock
        deadline = clock.monotonic() + min(wait_s, LONGEST_HOLD_S)
        while (lease := self._lease(gang)) is None and clock.monotonic() < deadline:
            self._offered.clear()
            try:
                async with clock.timeout(max(0.001, deadline - clock.monotonic()), "a bin"):
                    await self._offered.wait()
            except DeadlineExceeded:
                return None
        return lease

    def _lease(self, gang: str) -> BinLease | None:
        work = self._work
        if work is None:
            return None
        patience_s = min(max(LEAST_BIN_S, PATIENT_BINS * self._bin_s), self._bin_deadline_s)
        index = work.board.lease(gang, self._mesh.clock.monotonic() + patience_s)
        if index is None:
            return None
        return BinLease(
            step=work.step,
            version=work.step - 1,
            epoch=self._mesh.incarnation,
            index=index,
            manifest=work.manifest,
            arrays=work.bins[index].to_arrays(),
        )

    def done(self, result: BinResult) -> bool:
        """Counts a hybrid's result; False when the step has moved on or another came first."""
        work = self._work
        if work is None or (result.step, result.epoch) != (work.step, self._mesh.incarnation):
            return False
        if result.gradient.shape != (self._learner.size,) or result.gradient.dtype != np.float32:
            raise BadMessage(
                f"a gradient of {result.gradient.shape} for a model of {self._learner.size}"
            )
        gradient = torch.from_numpy(np.array(result.gradient))
        counted = work.board.done(result.index, (gradient, BinStats(**result.stats)))
        self._spent(result.gang, result.busy_s)
        self._progress.set()
        return counted

    async def total(self, step: int, bins: list[Bin], manifest: str) -> Result:
        """Sum over the bins, in their order, by whoever computed each with `manifest`'s weights."""
        work = self._work = StepWork(step, bins, manifest)
        self._offered.set()
        try:
            while not work.board.complete:
                index = work.board.take(self._mesh.clock.monotonic())
                if index is None:
                    await self._others(work)
                else:
                    work.board.done(index, await self._own(bins[index]))
        finally:
            self._work = None
        results = work.board.in_order()
        return await self._mesh.host.run_blocking(add, results, deadline_s=COMPUTE_S)

    async def _own(self, bin: Bin) -> Result:
        began = self._mesh.clock.monotonic()
        result = await self._mesh.host.run_blocking(
            self._learner.gradient, bin, deadline_s=COMPUTE_S
        )
        took = self._mesh.clock.monotonic() - began
        self._bin_s = took if not self._bin_s else 0.8 * self._bin_s + 0.2 * took
        self._spent(self._gang, took)
        return result

    def _spent(self, gang: str, seconds: float) -> None:
        self.busy_s[gang] = self.busy_s.get(gang, 0.0) + seconds

    async def _others(self, work: StepWork) -> None:
        """Until a hybrid's result comes or its lease runs out."""
        self._progress.clear()
        expiry = work.board.next_expiry()
        if work.board.complete or expiry is None:
            return
        left_s = max(0.01, expiry - self._mesh.clock.monotonic())
        try:
            async with self._mesh.clock.timeout(left_s, "a hybrid's bin"):
                await self._progress.wait()
        except DeadlineExceeded:
            return
