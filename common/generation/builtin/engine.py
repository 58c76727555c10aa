"""The scheduler of the built-in engine: what the next step runs, and how requests end.

Continuous batching at the level of tokens: each step holds one token of every request that decodes
and, up to a budget, stretches of known tokens (prompts, tool results) of requests that join. What
computes the step is a part (`parts.py`): a native decoder, or the same model in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.api.engine import Finish
from meshrl.common.base.clock import Clock, SystemClock
from meshrl.common.base.errors import ConfigError, Damaged, Refused
from meshrl.common.generation.batch.adapters import changes_of
from meshrl.common.generation.batch.paged import PagedMemory
from meshrl.common.generation.batch.parts import StepCompute
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.builtin.loaded import LoadedWeights, check_shapes, shapes_of
from meshrl.common.generation.builtin.prefix_loads import cached
from meshrl.common.generation.builtin.schedule import STRETCH, Schedule
from meshrl.common.generation.builtin.stop_text import StopText
from meshrl.common.generation.contract import (
    NO_VERSION,
    Flush,
    Ints,
    Request,
    SessionCache,
    check,
    in_use,
    no_weights,
    replacing,
    too_long,
)
from meshrl.common.generation.loading import Prefixes
from meshrl.common.model.architecture.config import ModelConfig


@dataclass(frozen=True)
class EngineOptions:
    """How an engine computes, whatever it computes with."""

    kv_on_update: str = "keep"
    steps: int = 1  # most in one call, if nothing joins or ends
    budget_s: float = 0.02
    decode: Callable[[Sequence[int]], str] | None = None  # of the tokenizer; None: no stop texts
    clock: Clock | None = None
    read_back: bool = False  # weights are compared with what they were to be: as long again


class TorchEngine:
    """The built-in engine; it keeps to the contract `TokenEngine`. It sleeps until `wake` brings
    the first weights, of this model's shapes.
    """

    def __init__(
        self,
        slots: Slots,
        compute: StepCompute,
        memory: PagedMemory,
        config: ModelConfig,
        path: str,
        options: EngineOptions,
    ) -> None:
        if options.kv_on_update not in ("keep", "recompute"):
            raise ConfigError(
                f"kv_on_update is {options.kv_on_update!r}",
                where="rollout.kv_on_update",
                fix="use keep or recompute",
            )
        self.path = path  # what computes, for people
        self.steps = 0
        self.tokens_generated = 0
        self.busy_s = 0.0
        self.compute_s = 0.0  # the part of busy_s that the model took
        self.due_s = 0.0
        self.tokens_computed = 0  # sampled or given, by the model; what was shared does not count
        self.tensor_parallel = 1
        self._slots, self._compute, self._memory = slots, compute, memory
        self._config, self._shapes, self._options = config, shapes_of(config), options
        self._clock = options.clock or SystemClock()
        self._recompute = options.kv_on_update == "recompute"
        self._stop_text = StopText(options.decode)
        self._queue: dict[int, Request] = {}  # waiting for a slot, by id, in order
        self._weights = LoadedWeights(slots)
        about = slots, compute, memory, self._weights, self._stop_text, self._clock
        self.schedule = Schedule(*about, mixed=not self._recompute)
        loads = self.schedule.loads
        self.expect, self.offer, self.keep_all = loads.expect, loads.offer, loads.keep_all
        self._paused = False

    @property
    def version(self) -> int:
        """The version of the loaded weights; NO_VERSION when there is no whole one."""
        return self._weights.version

    @property
    def preempted(self) -> int:
        """Requests that gave up their cache to older ones."""
        return self.schedule.preempted

    @property
    def running(self) -> int:
        """The number of requests that have a slot."""
        return self._slots.running

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return len(self._queue)

    @property
    def ended(self) -> bool:
        """Whether a request has ended since the last drain."""
        return self._slots.ended

    @property
    def adapters(self) -> Mapping[str, int]:
        """The versions of the adapters that are loaded beside the base, by their names."""
        return self._weights.adapters

    @property
    def prefill_tokens_per_s(self) -> float:
        """Known tokens computed in a second, as measured lately; 0: not measured yet."""
        return self.schedule.prefill.tokens_per_s

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values; 0: they cannot be moved."""
        return self._compute.cache_bytes_per_token

    @property
    def prefixes(self) -> Prefixes | None:
        """Where caches are kept that have no room here; None: nowhere."""
        return self.schedule.loads.prefixes

    @prefixes.setter
    def prefixes(self, prefixes: Prefixes | None) -> None:
        self.schedule.loads.prefixes = prefixes

    @property
    def cache_layout(self) -> str:
        """How keys and values lie in copies of its cache: engines of equal layout can use them."""
        return self._compute.layout

    # -- requests --------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes all requests or none; Refused names one that cannot be run. Ids in work are left
        alone.
        """
        for request in requests:
            check(request, self._compute.vocab_size, self._weights.places, self._config.absent_ids)
            self._stop_text.check(request)
        for request in requests:
            if request.id in self._queue or request.id in self._slots:
                continue
            if request.max_new < 1 or len(request.tokens) >= self._slots.max_length:
                self._slots.finish_unplaced(request.id, Finish.LENGTH)
            elif self._stop_text.met(request):
                self._slots.finish_unplaced(request.id, Finish.STOP)
            elif self._slots.keeps(request.session):
                self.schedule.start(request)
            else:
                self._queue[request.id] = request

    def abort(self, ids: Iterable[int]) -> None:
        """Ends these requests with ABORTED; ids that are not in work are skipped."""
        for request_id in ids:
            slot = self._slots.slot_of(request_id)
            if slot is not None:
                self.schedule.end(slot, Finish.ABORTED)
            elif self._queue.pop(request_id, None):
                self._slots.finish_unplaced(request_id, Finish.ABORTED)

    def release(self, sessions: Iterable[int]) -> None:
        """Frees the slots and blocks of sessions that have ended."""
        gone = list(sessions)
        for slot in self._slots.release(gone):
            self._memory.free(slot)
        self.schedule.loads.release(gone)

    def drain(self, ended_only: bool = False) -> Flush | None:
        """See `TokenEngine`."""
        return self._slots.drain(ended_only)

    def pause(self) -> None:
        """Makes `step` do nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Lets `step` run again after `pause`."""
        self._paused = False

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs one step of the batch, or several where no request joins. False: paused, asleep,
        quarantined, or no work.
        """
        if self._paused or not self._weights.able:
            return False
        began = self._clock.monotonic()
        while self._queue and self._slots.available():
            self.schedule.start(self._queue.pop(next(iter(self._queue))))
        self.schedule.loads.take()
        schedule = self.schedule
        steps = 1 if schedule.joining or self._stop_text else self._options.steps
        schedule.hold_room(steps)
        if schedule.joining:  # somebody had to give way: room is only sure for one step
            steps = 1
        joining, counts = schedule.plan()
        rows = schedule.rows
        if not len(rows) and not joining:
            return False
        self._run(rows, joining, counts, 1 if joining else steps)
        self.busy_s += self._clock.monotonic() - began
        return True

    def _run(
        self, rows: NDArray[np.int64], joining: list[int], stretches: list[int], steps: int
    ) -> None:
        slots, schedule = self._slots, self.schedule
        counts = np.ones(len(rows) + len(joining), np.int64)
        if joining:
            counts[len(rows) :] = stretches
            rows = np.concatenate((rows, np.array(joining, np.int64)))
        before, computed = slots.known[rows], slots.computed[rows]
        began = self._clock.monotonic()
        sampled = self._compute.run(rows, counts, steps, self._options.budget_s)
        took = self._clock.monotonic() - began
        self.compute_s += took
        if joining:
            schedule.prefill.add(sum(stretches), int(counts.sum()), took)
        self.tokens_generated += sampled
        self.steps += max(1, sampled // len(rows))
        self.tokens_computed += int((slots.computed[rows] - computed).sum())
        grew = slots.known[rows] > before
        first = slots.first_sampled[rows]
        slots.first_sampled[rows] = np.where(grew, np.minimum(first, before), first)
        for slot in joining:
            self._memory.publish(slot, tail=True)
            schedule.loads.meet(slot)
            ahead = slots.known[slot] - slots.computed[slot]
            if ahead < STRETCH and slot not in schedule.loads:
                schedule.set_joining(slot, False)
                schedule.loads.keep(slot, lost=False)
        if self._stop_text:
            self._stop_text.look(slots)
        for slot in rows[slots.finish[rows] != Finish.RUNNING].tolist():
            self.schedule.end(slot, Finish(slots.finish[slot]))

    # -- sessions that move ----------------------------------------------------------------------

    def cached(self, session: int) -> SessionCache | None:
        """See `TokenEngine`."""
        slot = self._slots.idle_slot(session)
        if slot is None or not self._weights.able:
            return None
        adapter = self._weights.name(int(self._slots.adapter[slot]))
        return cached(self._slots, slot, self._compute.layout, adapter)

    def copied(self, session: int, start: int, end: int) -> NDArray[np.uint8] | None:
        """See `TokenEngine`."""
        slot = self._slots.idle_slot(session)
        if slot is None or not self._weights.able or self._slots.computed[slot] < end:
            return None
        return self._compute.read(slot, start, end)

    # -- weights ---------------------------------------------------------------------------------

    def quarantine(self) -> None:
        """It computes nothing until it gets a whole version."""
        self._weights.version = NO_VERSION

    def swap(self, state: Mapping[str, Tensor], version: int) -> None:
        """What slots have cached stays, unless the engine was told to recompute; where none of a
        slot's tokens was sampled here yet it goes in any case: see `Slots.forget_unsampled`.
        """
        check_shapes(state, self._shapes)
        self._replace(state, version)

    def _replace(self, state: Mapping[str, Tensor], version: int) -> None:
        if not self._weights.asleep:
            with replacing(version, self.quarantine):
                self._compute.load(state)
                if self._options.read_back and (odd := self._compute.differing(state)):
                    raise Damaged(f"{len(odd)} tensors are not what was put there: {odd[0]}")
        # What is on its way is of the weights before.
        self._stop_loads(list(self.schedule.loads.under_way))
        self._weights.loaded_base(version)
        self._memory.forget()
        # An adapter's version stays, so its tokens would not tell.
        self.schedule.forget((self._slots.adapter > 0) | self._outdated())

    def _stop_loads(self, slots: list[int]) -> None:
        """Has these slots drop what is on its way to them, and withdraws what is offered."""
        for slot in slots:
            self.schedule.drop(slot, keep=False)
        self.schedule.loads.withdraw_all()

    def _outdated(self) -> NDArray[np.bool_]:
        """Slots [slots] whose cache goes if other weights come."""
        every = np.ones(self._slots.count, np.bool_)
        return every if self._recompute else self._slots.unsampled()

    # -- adapters --------------------------------------------------------------------------------

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int
    ) -> None:
        """Puts an adapter, or a new version of one, beside the base. What slots have cached with
        its last version stays as over `swap`. Refused when it does not fit, or no place is left;
        Quarantined when it broke off, and then the engine stands until it is loaded as a whole.
        """
        changes = changes_of(self._config, tensors, scale)
        place = self._weights.place_for(name)

        def quarantine() -> None:
            if name in self._weights.places:
                self._weights.broken.add(place)
            else:
                self._compute.drop_adapter(place)

        with replacing(version, quarantine):
            self._compute.load_adapter(place, changes)
        self._weights.loaded_adapter(name, place, version)
        under_way = self.schedule.loads.under_way
        self._stop_loads([i for i in under_way if self._slots.adapter[i] == place])
        self.schedule.forget((self._slots.adapter == place) & self._outdated())

    def unload_adapter(self, name: str) -> None:
        """Frees an adapter. Refused while requests with it are in work."""
        place = self._weights.places.get(name)
        if not place:
            return
        slots = self._slots
        waits = any(request.adapter == name for request in self._queue.values())
        if waits or (slots.adapter[slots.live()] == place).any():
            raise in_use(name)
        for slot in np.flatnonzero(slots.adapter == place).tolist():
            self.schedule.drop(slot, keep=False)
            slots.adapter[slot] = 0  # the place may be another's, whose cache this never is
        self._compute.drop_adapter(place)
        self.schedule.loads.withdraw_all()
        self._weights.unloaded(name)

    def sleep(self) -> None:
        """Gives back weights and cache; what is known stays, and is computed again on waking."""
        if self._weights.asleep:
            return
        self._weights.asleep = True
        self.keep_all()
        for slot in range(self._slots.count):
            self.schedule.drop(slot, keep=False)
        self._memory.forget()
        self.schedule.compute_again(np.ones(self._slots.count, np.bool_))
        self._compute.sleep()

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        """Takes back the memory that `sleep` gave away and loads weights of `version`. Refused if
        their shapes differ.
        """
        check_shapes(state, self._shapes)
        if self._weights.asleep:
            self._compute.wake()
            self._weights.asleep = False
        self._replace(state, version)

    def score(self, tokens: Ints, adapter: str = "") -> NDArray[np.float32]:
        """Log-probabilities at temperature 1 of all tokens but the first: float32 [n - 1]. Refused
        if the engine sleeps or the sequence does not fit.
        """
        row = np.asarray(tokens, np.int32)
        asked = Request(-1, row, 0, 1.0, (), 0, -1, adapter=adapter)
        check(asked, self._compute.vocab_size, self._weights.places, self._config.absent_ids)
        if not self._weights.able:
            raise no_weights()
        if len(tokens) > self._slots.max_length:
            raise too_long(len(tokens), self._slots.max_length)
        blocks = self.schedule.borrow(len(tokens))
        if blocks is None:
            raise Refused(
                f"{len(tokens)} tokens do not fit the cache",
                where="engine",
                fix="raise rollout.kv_tokens",
            )
        try:
            return self._compute.score(row, blocks, self._weights.places[adapter])
        finally:
            self._memory.give_back(blocks)
