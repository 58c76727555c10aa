"""Computation of emulated processes of a virtual mesh: an engine that produces a token per step,
and arithmetic without its own duration.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from meshrl.common.base.clock import Clock
from meshrl.common.generation.counter_rng import draw_uniforms, seed_to_key
from meshrl.common.generation.engine_contract import GenerationRequest
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.sim.engines.simulated_engine import STANDARD_NORMAL, SimulatedEngine
from meshrl.sim.mesh.job.emulated_workload import ENGINE_SLOTS, MAX_TOKENS, EmulatedWorkload
from meshrl.sim.mesh.job.vector_arithmetic import VectorArithmetic, VectorLearner, VectorSoleRank

INSTANT_S = 0.001  # duration of arithmetic without emulation


class _StepClock:
    """Clock that advances in steps."""

    def __init__(self) -> None:
        self.count = 0

    def monotonic(self) -> float:
        return float(self.count)


class SteppedEngine(SimulatedEngine):
    """Engine that gives every running request a token per step, whatever the step's duration.

    A submitted request begins with the next step, whose duration so contains its prefill. The
    length of a turn is drawn from its trajectory and the start of the turn, so a turn that
    continues at another engine has the same end.
    """

    def __init__(self, workload: EmulatedWorkload) -> None:
        self._workload, self._step_clock, self._is_stepping = workload, _StepClock(), False
        clock = cast(Clock, self._step_clock)
        super().__init__(clock, ENGINE_SLOTS, 1.0, max_length=MAX_TOKENS, version=-1)

    @property
    def next_step_delay_s(self) -> float:
        return 0.0  # the emulation determines the time

    def step(self) -> bool:
        self._is_stepping = True
        try:
            self._fill_slots(self._now_s)
            self._step_clock.count += bool(self._slots.slot_of) and not self._is_stopped
            return super().step()
        finally:
            self._is_stepping = False

    def _fill_slots(self, at_s: float) -> None:
        if self._is_stepping and not self._is_stopped:
            super()._fill_slots(at_s)

    def _draw_length(self, request: GenerationRequest) -> int:
        begin = len(request.tokens) if request.turn_start < 0 else request.turn_start
        key = np.array([seed_to_key(request.seed)], np.uint64)
        deviation = STANDARD_NORMAL.inv_cdf(float(draw_uniforms(key, np.array([begin]))[0]))
        share = self._workload.compute_progress(self.version)
        turn_tokens = self._workload.median_tokens.get_value(share) * math.exp(
            self._workload.log_sigma.get_value(share) * deviation
        )
        return max(1, round(turn_tokens) - (len(request.tokens) - begin))


class InstantLearner(VectorLearner):
    """Learner whose duration is emulated."""

    gradient_s = update_s = INSTANT_S


class InstantSoleRank(VectorSoleRank):
    """Sole rank whose duration is emulated."""

    gradient_s = update_s = INSTANT_S


class InstantArithmetic(VectorArithmetic):
    """Arithmetic of a workload's training processes."""

    def make_learner(self, data: JobData) -> Learner:
        return InstantLearner(data.config.seed)

    def make_rank(self, data: JobData, placement: Placement, accelerator: str) -> Rank:
        if placement.ranks == 1:
            return InstantSoleRank.for_single_rank(self.make_learner(data))
        return super().make_rank(data, placement, accelerator)
