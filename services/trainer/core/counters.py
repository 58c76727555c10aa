"""Counters of a core: what its steps have done so far, and where their time went."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.demand.measured import MeasuredWork
from meshrl.services.trainer.arithmetic.stats import update_metrics
from meshrl.services.trainer.compute.piece_runner import PieceRunner
from meshrl.services.trainer.core.committing import EVALUATION
from meshrl.services.trainer.hybrids.gradients import Gradients
from meshrl.services.trainer.steps.intake import Intake
from meshrl.services.trainer.steps.step import Stepped
from meshrl.services.trainer.steps.step_parts import StepParts, StepTook


class StepCounters:
    """Sums over the steps that this process has committed; seconds."""

    def __init__(self, mesh: Mesh, runner: PieceRunner, intake: Intake) -> None:
        self._clock, self._runner, self._intake = mesh.clock, runner, intake
        self.parts = StepParts(lambda: mesh.clock.monotonic() - runner.nap.total_s)
        self.steps, self.tokens = 0, 0
        self.busy_s, self.wait_s = 0.0, 0.0
        self.held_s = 0.0  # of busy_s: waited for evaluations
        self._began: tuple[float, ...] = ()  # what the clocks said when the step began

    def work(self, gradients: Gradients) -> MeasuredWork:
        return MeasuredWork(
            steps=self.steps,
            busy_s=self.busy_s,
            wait_s=self.wait_s,
            held_s=self.held_s,
            work_s=gradients.work_s,
            tokens=self.tokens,
        )

    def begin(self) -> None:
        """A step begins; one that was cut off is forgotten."""
        self.parts.began()
        self._began = self._clocks()

    def _clocks(self) -> tuple[float, ...]:
        runner = self._runner
        return (
            self._clock.monotonic(),
            self._intake.waited_s,
            runner.nap.total_s,
            runner.turns.waited_s,
            self.parts.total.get(EVALUATION, 0.0),
        )

    def _since(self) -> list[float]:
        pairs = zip(self._clocks(), self._began, strict=True)
        return [now - before for now, before in pairs]

    def metrics(
        self, step: int, done: Stepped, busy_s: dict[str, float], core: str
    ) -> dict[str, Any]:
        """Return the metrics of a computed step; `busy_s` says who computed for how long."""
        self.parts.took("update", done.update_s)
        self.parts.took("compute", busy_s.get(core, 0.0))
        took, waited, asleep, turned, _ = self._since()
        busy = took - waited - asleep
        updated = update_metrics(done.bins, done.norm, done.stats, done.counted)
        times = StepTook(step, waited, busy, turned, self._clock.wall(), dict(busy_s))
        return done.batch.metrics() | updated | asdict(times)

    def commit(self, tokens: int) -> None:
        took, waited, asleep, _, held = self._since()
        self.busy_s += took - waited - asleep
        self.wait_s += waited
        self.held_s += held
        self.steps += 1
        self.tokens += tokens
        self.parts.ended()
