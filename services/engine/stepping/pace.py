"""An engine slowed down to the pace of a declared accelerator: its tokens are real, its steps
padded.

Two cores can so stand for several accelerators, as long as the engine inside is faster than what it
stands for. A step's tokens show when the step would have ended; weights, pauses and aborts take
effect at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.api.engine import Finish
from common.clock import Clock
from common.generation.contract import (
    Flush,
    Ints,
    Request,
    SessionCache,
    TokenEngine,
    joined,
    rows_of,
)
from common.job.pace import LATE, Pace

if TYPE_CHECKING:
    from torch import Tensor

    from common.generation.loading import Loading


class PacedEngine:
    """See `TokenEngine`; whatever `inner` has beyond that is reachable there."""

    def __init__(self, inner: TokenEngine, pace: Pace, clock: Clock, degree: int = 1) -> None:
        """`inner` does one step a call, so that none of its tokens shows too early. The pace is of
        one accelerator; the engine is as fast as `degree` of them that share its model.
        """
        self.inner, self.pace, self._degree = inner, pace.of_degree(degree), degree
        self._clock = clock
        self._ends_s = 0.0  # when the step that runs would be over
        self._seen: Flush | None = None  # what its accelerator would have brought by now
        self._cost_s = 0.0  # what it takes; 0: none runs
        self.busy_s = 0.0
        self._steps, self._late = 0, 0

    @property
    def late(self) -> dict[str, int]:
        """Steps at the pace so far, and those of them that ended late: by more than LATE of what
        they take.
        """
        return {"paced": self._steps, "late": self._late}

    def begin(self) -> None:
        """Others have had the accelerator: there is no lateness to make up for."""
        self._end_of_step()
        self._ends_s = max(self._ends_s, self._clock.monotonic())

    @property
    def path(self) -> str:
        return f"{self.inner.path}, paced"

    @property
    def tensor_parallel(self) -> int:
        return self._degree

    @property
    def preempted(self) -> int:
        return self.inner.preempted

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def adapters(self) -> Mapping[str, int]:
        return self.inner.adapters

    @property
    def running(self) -> int:
        return self.inner.running

    @property
    def waiting(self) -> int:
        return self.inner.waiting

    @property
    def tokens_generated(self) -> int:
        return self.inner.tokens_generated

    @property
    def tokens_computed(self) -> int:
        return self.inner.tokens_computed

    @property
    def steps(self) -> int:
        return self.inner.steps

    @property
    def ended(self) -> bool:
        return self._seen is not None and bool((self._seen.finish != Finish.RUNNING).any())

    @property
    def due_s(self) -> float:
        return max(0.0, self._ends_s - self._clock.monotonic(), self.inner.due_s)

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner.submit(requests)

    def abort(self, ids: Iterable[int]) -> None:
        self.inner.abort(ids)

    def release(self, sessions: Iterable[int]) -> None:
        self.inner.release(sessions)

    def step(self) -> bool:
        now = self._clock.monotonic()
        if now < self._ends_s:
            return True
        self._end_of_step()
        sampled, steps = self.inner.tokens_generated, self.inner.steps
        computed = self.inner.tokens_computed
        busy = self.inner.step()
        sampled = self.inner.tokens_generated - sampled
        steps = self.inner.steps - steps
        prefilled = max(0, self.inner.tokens_computed - computed - sampled)
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
            self._steps += 1
            self._late += late_s > LATE * self._cost_s
            self._cost_s = 0.0
        self._show()

    def _show(self) -> None:
        """What the last step brought is there now."""
        brought = self.inner.drain()
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

    def swap(self, state: Mapping[str, Tensor], version: int) -> None:
        self.inner.swap(state, version)

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int
    ) -> None:
        self.inner.load_adapter(name, tensors, scale, version)

    def quarantine(self) -> None:
        self.inner.quarantine()

    def unload_adapter(self, name: str) -> None:
        self.inner.unload_adapter(name)

    def pause(self) -> None:
        self.inner.pause()

    def resume(self) -> None:
        self.inner.resume()

    def sleep(self) -> None:
        self.inner.sleep()

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        self.inner.wake(state, version)

    def score(self, tokens: Ints, adapter: str = "") -> NDArray[np.float32]:
        return self.inner.score(tokens, adapter)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.pace.prefill_tokens_per_s

    @property
    def cache_bytes_per_token(self) -> int:
        return self.inner.cache_bytes_per_token

    def cached(self, session: int) -> SessionCache | None:
        return self.inner.cached(session)

    def copied(self, session: int, start: int, end: int) -> NDArray[np.uint8] | None:
        return self.inner.copied(session, start, end)

    def expect(self, session: int, load: Loading) -> None:
        self.inner.expect(session, load)

    def offer(self, session: int, cache: SessionCache, load: Loading) -> bool:
        return self.inner.offer(session, cache, load)
