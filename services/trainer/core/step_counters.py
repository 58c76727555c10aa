"""Counters of a core: its steps so far, and their durations."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.demand.measurements import MeasuredWork
from meshrl.services.trainer.compute.piece_runner import PieceRunner
from meshrl.services.trainer.core.step_commits import EVALUATION_PART
from meshrl.services.trainer.hybrids.gradient_collector import GradientCollector
from meshrl.services.trainer.learner.stats import build_update_metrics
from meshrl.services.trainer.steps.group_intake import GroupIntake
from meshrl.services.trainer.steps.step_durations import StepDurations, StepPartTimer
from meshrl.services.trainer.steps.training_step import StepResult


class StepCounters:
    """Sums over the steps that this process has committed; times in seconds."""

    def __init__(self, mesh: Mesh, runner: PieceRunner, intake: GroupIntake) -> None:
        self._clock, self._runner, self._intake = mesh.clock, runner, intake
        self.part_timer = StepPartTimer(lambda: mesh.clock.monotonic() - runner.sleep_timer.total_s)
        self.steps, self.tokens = 0, 0
        self.busy_s, self.wait_s = 0.0, 0.0
        self.evaluation_wait_s = 0.0  # part of busy_s: waits for evaluations
        self._start_clocks: tuple[float, ...] = ()  # clock values at the step's begin

    def get_work(self, gradients: GradientCollector) -> MeasuredWork:
        return MeasuredWork(
            steps=self.steps,
            busy_s=self.busy_s,
            wait_s=self.wait_s,
            held_s=self.evaluation_wait_s,
            work_s=gradients.work_s,
            tokens=self.tokens,
        )

    def begin_step(self) -> None:
        """Begin a step; discard the counts of an interrupted one."""
        self.part_timer.begin_step()
        self._start_clocks = self._read_clocks()

    def _read_clocks(self) -> tuple[float, ...]:
        runner = self._runner
        return (
            self._clock.monotonic(),
            self._intake.waited_s,
            runner.sleep_timer.total_s,
            runner.time_slices.wait_time_s,
            self.part_timer.total_s.get(EVALUATION_PART, 0.0),
        )

    def _measure_elapsed_s(self) -> list[float]:
        pairs = zip(self._read_clocks(), self._start_clocks, strict=True)
        return [now - before for now, before in pairs]

    def build_metrics(
        self, step: int, result: StepResult, busy_s: dict[str, float], instance: str
    ) -> dict[str, Any]:
        """Return the metrics of a computed step; `busy_s` has compute seconds by instance."""
        self.part_timer.add("update", result.update_s)
        self.part_timer.add("compute", busy_s.get(instance, 0.0))
        elapsed_s, waited, asleep, turned, _ = self._measure_elapsed_s()
        busy = elapsed_s - waited - asleep
        updated = build_update_metrics(
            result.bin_count, result.gradient_norm, result.stats, result.denominator_sum
        )
        times = StepDurations(step, waited, busy, turned, self._clock.wall(), dict(busy_s))
        return result.batch.build_metrics() | updated | asdict(times)

    def commit_step(self, tokens: int) -> None:
        elapsed_s, waited, asleep, _, evaluation_wait_s = self._measure_elapsed_s()
        self.busy_s += elapsed_s - waited - asleep
        self.wait_s += waited
        self.evaluation_wait_s += evaluation_wait_s
        self.steps += 1
        self.tokens += tokens
        self.part_timer.end_step()
