"""Emulated accelerator: real tokens, with each step padded to a declared duration.

Two cores can emulate several accelerators, as long as the engine is faster than the emulated one. A
step's tokens appear when the emulated step ends; weights, pauses and aborts take effect at once.
"""

from __future__ import annotations

import numpy as np

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.clock import Clock
from meshrl.common.generation.engine_contract import (
    EngineOutput,
    TokenEngine,
    concatenate_outputs,
    select_requests,
)
from meshrl.common.job.emulation import LATE_SHARE, EmulatedEngineSpeed


class EmulatedSteps:
    """Steps of an engine at a declared speed; see `SteppableEngine`."""

    def __init__(
        self,
        engine: TokenEngine,
        profile: EmulatedEngineSpeed,
        clock: Clock,
        tensor_parallel_size: int = 1,
    ) -> None:
        """Initialize the emulation.

        `engine` does one step a call, so that no token appears too early. `profile` describes one
        accelerator; the steps are those of `tensor_parallel_size` accelerators that share the
        model.
        """
        self._engine, self.profile, self.tensor_parallel_size = (
            engine,
            profile.with_tensor_parallel(tensor_parallel_size),
            tensor_parallel_size,
        )
        self.backend = f"{engine.backend}, emulated"
        self._clock = clock
        self._step_ends_s = 0.0  # when the emulated step ends
        self._due_flush: EngineOutput | None = (
            None  # output that the emulated accelerator would have finished by now
        )
        self._step_cost_s = 0.0  # duration of the running step; 0: none runs
        self.busy_s = 0.0
        self.emulated_count = self.late_count = 0  # finished steps, and those that ended late

    def reset_lateness(self) -> None:
        """Reset the lateness, because other instances have used the accelerator."""
        self._finish_due_step()
        self._step_ends_s = max(self._step_ends_s, self._clock.monotonic())

    @property
    def has_finished(self) -> bool:
        return self._due_flush is not None and bool(
            (self._due_flush.finish_reasons != FinishReason.RUNNING).any()
        )

    @property
    def next_step_delay_s(self) -> float:
        return max(0.0, self._step_ends_s - self._clock.monotonic(), self._engine.next_step_delay_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.profile.prefill_tokens_per_s

    def step(self) -> bool:
        engine, now = self._engine, self._clock.monotonic()
        if now < self._step_ends_s:
            return True
        self._finish_due_step()
        sampled, steps, computed = engine.tokens_generated, engine.num_steps, engine.tokens_computed
        busy = engine.step()
        sampled = engine.tokens_generated - sampled
        steps = engine.num_steps - steps
        prefilled = max(0, engine.tokens_computed - computed - sampled)
        batch = -(-sampled // steps) if steps else 0
        cost_s = self.profile.compute_step_s(batch, steps, prefilled)
        # The next step makes up for a late poll, because an accelerator has no such delay.
        late = now - self._step_ends_s
        self._step_ends_s = (self._step_ends_s if late < cost_s else now) + cost_s
        self.busy_s += cost_s
        self._step_cost_s = cost_s
        if not busy:
            self._collect_due_tokens()
        return busy or cost_s > 0

    def _finish_due_step(self) -> None:
        """Finish the emulated step if it is due; count how late the poll noticed its end."""
        late_s = self._clock.monotonic() - self._step_ends_s
        if late_s < 0:
            return
        if self._step_cost_s:
            self.emulated_count += 1
            self.late_count += late_s > LATE_SHARE * self._step_cost_s
            self._step_cost_s = 0.0
        self._collect_due_tokens()

    def _collect_due_tokens(self) -> None:
        outputs = self._engine.drain_outputs()
        if outputs is not None:
            self._due_flush = (
                outputs
                if self._due_flush is None
                else concatenate_outputs(self._due_flush, outputs)
            )

    def drain_outputs(self, finished_only: bool = False) -> EngineOutput | None:
        self._finish_due_step()
        due_outputs, self._due_flush = self._due_flush, None
        if due_outputs is None or not finished_only:
            return due_outputs
        over = np.isin(
            due_outputs.ids, due_outputs.ids[due_outputs.finish_reasons != FinishReason.RUNNING]
        )
        if not over.all():
            self._due_flush = select_requests(due_outputs, ~over)
        return select_requests(due_outputs, over) if over.any() else None
