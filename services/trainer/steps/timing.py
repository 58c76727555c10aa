"""Where the steps of a core spend their time: its phases one after the other, what its intake does
beside them, its rounds, and the checkpoints that are written meanwhile.
"""

from __future__ import annotations

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.telemetry.stopwatch import UNTIMED, Stopwatch, Untimed
from meshrl.common.records.run_lines import Traces

BESIDE = "writing"  # of a checkpoint: a phase by name, which goes on beside those of the next step
MOST = 1024  # rounds of a step that are told one by one


class StepTimes:
    """Those of the step under way; a step that is cut off is not told."""

    def __init__(self, mesh: Mesh, data: JobData) -> None:
        self._clock = mesh.clock
        self._traces = Traces(mesh, data, "trainer")
        self._phases: Stopwatch | None = None
        self.intake: Untimed = UNTIMED
        self._step, self._began = 0, 0.0
        self._rounds: list[float] = []  # when each began in the step, and its milliseconds

    def begin(self, step: int) -> None:
        """A step begins, by waiting for its groups."""
        if not self._traces.wanted:
            return
        self._step, self._began, self._rounds = step, self._clock.monotonic(), []
        self._phases, self.intake = (
            Stopwatch(self._clock, "waiting"),
            Stopwatch(self._clock, "wait"),
        )

    def enter(self, phase: str) -> None:
        if self._phases is not None and phase != BESIDE:
            self._phases.enter(phase)

    def round(self, began: float, took: float) -> None:
        """The core has computed a round, which began then (monotonic); seconds."""
        if self._phases is not None and len(self._rounds) < 2 * MOST:
            self._rounds += (_ms(began - self._began), _ms(took))

    def checkpoint(self, step: int, took: float) -> None:
        """A checkpoint has been written, from so many seconds ago until now."""
        at = round(self._clock.wall() - took, 6)
        row = {"kind": "checkpoint", "at": at, "step": step, "parts": ["write", _ms(took)]}
        self._traces.write(row)

    def ended(self, tokens: int) -> None:
        phases, intake = self._phases, self.intake
        if phases is None or not isinstance(intake, Stopwatch):
            return
        self._phases, self.intake = None, UNTIMED
        self._traces.write(
            {
                "kind": "step",
                "at": round(phases.began, 6),
                "step": self._step,
                "tokens": tokens,
                "parts": phases.parts(),
                "intake": intake.parts(),
                "rounds": self._rounds,
            }
        )

    async def close(self) -> None:
        await self._traces.close()


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
