"""The emulation of a declared accelerator: an engine's tokens are real, its steps padded.

Two cores can so stand for several accelerators, as long as the engine is faster than what it
emulates. A step's tokens show when the step would have ended; weights, pauses and aborts take
effect at once.
"""

from __future__ import annotations

import numpy as np

from meshrl.common.api.engine import Finish
from meshrl.common.base.clock import Clock
from meshrl.common.generation.contract import Flush, TokenEngine, joined, rows_of
from meshrl.common.job.pace import LATE, Pace


class EmulatedSteps:
    """The steps of an engine at a declared pace; see `EngineSteps`."""

    def __init__(self, engine: TokenEngine, pace: Pace, clock: Clock, degree: int = 1) -> None:
        """`engine` does one step a call, so that none of its tokens shows too early. The pace is of
        one accelerator; the steps are those of `degree` of them that share the model.
        """
        self._engine, self.pace, self.tensor_parallel = engine, pace.of_degree(degree), degree
        self.path = f"{engine.path}, paced"
        self._clock = clock
        self._ends_s = 0.0  # when the step that runs would be over
        self._seen: Flush | None = None  # what its accelerator would have brought by now
        self._cost_s = 0.0  # what it takes; 0: none runs
        self.busy_s = 0.0
        self.paced = self.late = 0  # steps so far, and those that ended LATE

    def begin(self) -> None:
        """Others have had the accelerator: there is no lateness to make up for."""
        self._end_of_step()
        self._ends_s = max(self._ends_s, self._clock.monotonic())

    @property
    def ended(self) -> bool:
        return self._seen is not None and bool((self._seen.finish != Finish.RUNNING).any())

    @property
    def due_s(self) -> float:
        return max(0.0, self._ends_s - self._clock.monotonic(), self._engine.due_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.pace.prefill_tokens_per_s

    def step(self) -> bool:
        engine, now = self._engine, self._clock.monotonic()
        if now < self._ends_s:
            return True
        self._end_of_step()
        sampled, steps, computed = engine.tokens_generated, engine.steps, engine.tokens_computed
        busy = engine.step()
        sampled = engine.tokens_generated - sampled
        steps = engine.steps - steps
        prefilled = max(0, engine.tokens_computed - computed - sampled)
        batch = -(-sampled // steps) if steps else 0
        cost_s = self.pace.step_s(batch, steps, prefilled)
        # A late look at the clock is made up for, as an accelerator has no such lateness.
        late = now - self._ends_s
        self._ends_s = (self._ends_s if late < cost_s else now) + cost_s
        self.busy_s += cost_s
        self._cost_s = cost_s
        if not busy:
            self._show()
        return busy or cost_s > 0

    def _end_of_step(self) -> None:
        """What is over by now shows; if it is a step that ran, how late it is noticed counts."""
        late_s = self._clock.monotonic() - self._ends_s
        if late_s < 0:
            return
        if self._cost_s:
            self.paced += 1
            self.late += late_s > LATE * self._cost_s
            self._cost_s = 0.0
        self._show()

    def _show(self) -> None:
        brought = self._engine.drain()
        if brought is not None:
            self._seen = brought if self._seen is None else joined(self._seen, brought)

    def drain(self, ended_only: bool = False) -> Flush | None:
        self._end_of_step()
        seen, self._seen = self._seen, None
        if seen is None or not ended_only:
            return seen
        over = np.isin(seen.ids, seen.ids[seen.finish != Finish.RUNNING])
        if not over.all():
            self._seen = rows_of(seen, ~over)
        return rows_of(seen, over) if over.any() else None
