"""What paced processes of a virtual mesh compute with: an engine that makes a token a step, and
arithmetic that takes no time of its own.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from meshrl.common.base.clock import Clock
from meshrl.common.generation.contract import Request
from meshrl.common.generation.counter import key_of, uniforms
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.services.trainer.arithmetic.learner import Learner
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.sim.engines.simulated import NORMAL, SimulatedEngine
from meshrl.sim.mesh.job.arithmetic import TinyAlone, TinyArithmetic, TinyLearner
from meshrl.sim.mesh.job.workload import LONGEST, SLOTS, PacedWorkload

AT_ONCE_S = 0.001  # what arithmetic takes without its pace


class _Steps:
    """A clock that is read in steps."""

    def __init__(self) -> None:
        self.count = 0

    def monotonic(self) -> float:
        return float(self.count)


class SteppedEngine(SimulatedEngine):
    """Every request that runs gets a token a step, whatever time that takes; what is submitted
    begins with the next step, which so shows its prefill.

    The length of a turn is drawn from its trajectory and where the turn begins, so that one that
    goes on at another engine ends where it would have ended here.
    """

    def __init__(self, workload: PacedWorkload) -> None:
        self._workload, self._ticks, self._stepping = workload, _Steps(), False
        clock = cast(Clock, self._ticks)
        super().__init__(clock, SLOTS, 1.0, max_length=LONGEST, version=-1)

    @property
    def due_s(self) -> float:
        return 0.0  # whoever paces it says when

    def step(self) -> bool:
        self._stepping = True
        try:
            self._fill(self._now_s)
            self._ticks.count += bool(self._slots.slot_of) and not self._stands
            return super().step()
        finally:
            self._stepping = False

    def _fill(self, at_s: float) -> None:
        if self._stepping and not self._stands:
            super()._fill(at_s)

    def _drawn_length(self, request: Request) -> int:
        begin = len(request.tokens) if request.begin < 0 else request.begin
        key = np.array([key_of(request.seed)], np.uint64)
        deviation = NORMAL.inv_cdf(float(uniforms(key, np.array([begin]))[0]))
        share = self._workload.share(self.version)
        whole = self._workload.median.at(share) * math.exp(
            self._workload.sigma.at(share) * deviation
        )
        return max(1, round(whole) - (len(request.tokens) - begin))


class PacedLearner(TinyLearner):
    """What it takes is its pace's."""

    gradient_s = update_s = AT_ONCE_S


class PacedAlone(TinyAlone):
    """What it takes is its pace's."""

    gradient_s = update_s = AT_ONCE_S


class PacedArithmetic(TinyArithmetic):
    """What training processes of a workload compute with."""

    def learner(self, data: JobData) -> Learner:
        return PacedLearner(data.config.seed)

    def rank(self, data: JobData, seat: Seat, accelerator: str) -> Rank:
        if seat.ranks == 1:
            return PacedAlone.alone(self.learner(data))
        return super().rank(data, seat, accelerator)
