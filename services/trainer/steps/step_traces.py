"""Traces of a core's steps: phases, group intake, rounds, and checkpoint writes beside them."""

from __future__ import annotations

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.telemetry.stopwatch import NULL_STOPWATCH, NullStopwatch, Stopwatch
from meshrl.common.records.line_files import TraceWriter

# of a checkpoint: a named phase that overlaps with those of the next step
WRITING_PHASE = "writing"
MAX_TRACED_ROUNDS = 1024  # rounds of a step that are traced one by one


class StepTraceWriter:
    """Writer of the current step's trace; an interrupted step is not written."""

    def __init__(self, mesh: Mesh, data: JobData) -> None:
        self._clock = mesh.clock
        self._traces = TraceWriter(mesh, data, "trainer")
        self._phases: Stopwatch | None = None
        self.intake: NullStopwatch = NULL_STOPWATCH
        self._step, self._began_s = 0, 0.0
        self._rounds: list[float] = []  # start of each in the step and its duration, both ms

    def begin_step(self, step: int) -> None:
        """Begin the trace of a step with its wait for groups."""
        if not self._traces.is_enabled:
            return
        self._step, self._began_s, self._rounds = step, self._clock.monotonic(), []
        self._phases, self.intake = (
            Stopwatch(self._clock, "waiting"),
            Stopwatch(self._clock, "wait"),
        )

    def enter_phase(self, phase: str) -> None:
        if self._phases is not None and phase != WRITING_PHASE:
            self._phases.enter(phase)

    def add_round(self, start_s: float, duration_s: float) -> None:
        """Add a round that the core computed from `start_s` (monotonic), seconds."""
        if self._phases is not None and len(self._rounds) < 2 * MAX_TRACED_ROUNDS:
            self._rounds += (_to_ms(start_s - self._began_s), _to_ms(duration_s))

    def add_checkpoint(self, step: int, duration_s: float) -> None:
        """Write the trace of a checkpoint that took `duration_s` until now."""
        at = round(self._clock.wall() - duration_s, 6)
        row = {"kind": "checkpoint", "at": at, "step": step, "parts": ["write", _to_ms(duration_s)]}
        self._traces.write(row)

    def end_step(self, tokens: int) -> None:
        phases, intake = self._phases, self.intake
        if phases is None or not isinstance(intake, Stopwatch):
            return
        self._phases, self.intake = None, NULL_STOPWATCH
        self._traces.write(
            {
                "kind": "step",
                "at": round(phases.started_at, 6),
                "step": self._step,
                "tokens": tokens,
                "parts": phases.list_parts(),
                "intake": intake.list_parts(),
                "rounds": self._rounds,
            }
        )

    async def close(self) -> None:
        await self._traces.close()


def _to_ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
