"""The scheduler of the built-in engine: what the next step runs, and how requests end.

Continuous batching at the level of tokens: each step holds one token of every request that decodes
and, up to a budget, stretches of known tokens (prompts, tool results) of requests that join. What
computes the step and where keys and values lie are parts (`parts.py`): a native decoder over a
paged cache, or the same model in eager torch over contiguous slots.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.api.engine import Finish
from common.clock import Clock, SystemClock
from common.errors import ConfigError, Damaged, Refused
from common.generation.batch.adapters import MOST_ADAPTERS, changes_of
from common.generation.batch.parts import SHARE_FROM, Memory, StepCompute
from common.generation.batch.slots import Slots
from common.generation.builtin.cache_moves import cached
from common.generation.builtin.prefill_rate import PrefillRate
from common.generation.builtin.prefix_loads import PrefixLoads
from common.generation.builtin.stop_text import StopText
from common.generation.builtin.weights import check_shapes, shapes_of
from common.generation.contract import (
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
from common.generation.loading import Loading, Prefixes
from common.model.config import ModelConfig

PREFILL_TOKENS = 512  # known tokens in a step, so that decoding rows do not wait for long


class TorchEngine:
    """The built-in engine; it keeps to the contract `TokenEngine`. It sleeps until `wake` brings
    the first weights, of this model's shapes.
    """

    def __init__(
        self,
        slots: Slots,
        compute: StepCompute,
        memory: Memory,
        config: ModelConfig,
        *,
        path: str,
        kv_on_update: str = "keep",
        steps: int = 1,
        budget_s: float = 0.02,
        decode: Callable[[Sequence[int]], str] | None = None,
        clock: Clock | None = None,
        read_back: bool = False,
    ) -> None:
        """`read_back`: weights are compared, after they were put in place, with what they were to
        be: it takes as long again.
        """
        if kv_on_update not in ("keep", "recompute"):
            raise ConfigError(
                f"kv_on_update is {kv_on_update!r}",
                where="rollout.kv_on_update",
                fix="use keep or recompute",
            )
        self.path = path  # what computes, for people
        self.version = NO_VERSION
        self.steps = 0
        self.tokens_generated = 0
        self.busy_s = 0.0
        self.compute_s = 0.0  # the part of busy_s that the model took
        self.due_s = 0.0
        self.tokens_computed = 0  # sampled or given, by the model; what was shared does not count
        self.tensor_parallel = 1
        self.preempted = 0  # requests that gave up their cache to older ones
        self._slots, self._compute, self._memory = slots, compute, memory
        self._config, self._shapes = config, shapes_of(config)
        self._clock = clock or SystemClock()
        self._recompute = kv_on_update == "recompute"
        self._read_back = read_back
        self._places: dict[str, int] = {"": 0}  # of adapters that are loaded; the base has none
        self._broken: set[int] = set()  # of which some tensors are of one version, some of another
        self._prefill_rate = PrefillRate()
        self._steps, self._budget_s = steps, budget_s  # most in one call, if nothing joins or ends
        self._stretch = max(2, compute.prefill_from)  # tokens to compute from which a slot joins
        self._stop_text = StopText(decode)
        self._queue: dict[int, Request] = {}  # waiting for a slot, by id, in order
        self._started = np.zeros(slots.count, np.int64)  # when: the older go first
        self._starts = 0
        self._joining: list[int] = []  # slots with more than one token to compute, oldest first
        self.loads = PrefixLoads(
            *(slots, compute, memory, self._clock, self._joining, self._places),
            mixed=not self._recompute,
            whole=lambda: self.version != NO_VERSION and not self._broken,
            able=lambda: self._able,
        )
        self._decoding = np.zeros(slots.count, bool)
        self._rows: NDArray[np.int64] | None = None  # the decoding slots, ascending; None: changed
        self._numbered = 0  # weights that have come, of the base or of an adapter
        self._paused = False
        self._asleep = True

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
        whole = {name: at for name, at in self._places.items() if at and at not in self._broken}
        return {name: int(self._slots.loaded[at]) for name, at in whole.items()}

    @property
    def prefill_tokens_per_s(self) -> float:
        """Known tokens computed in a second, as measured lately; 0: not measured yet."""
        return self._prefill_rate.tokens_per_s

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values; 0: they cannot be moved."""
        return self._compute.cache_bytes_per_token

    @property
    def prefixes(self) -> Prefixes | None:
        """Where caches are kept that have no room here; None: nowhere."""
        return self.loads.prefixes

    @prefixes.setter
    def prefixes(self, prefixes: Prefixes | None) -> None:
        self.loads.prefixes = prefixes

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
            check(request, self._compute.vocab_size, self._places, self._config.absent_ids)
            self._stop_text.check(request)
        for request in requests:
            if request.id in self._queue or request.id in self._slots:
                continue
            if request.max_new < 1 or len(request.tokens) >= self._slots.max_length:
                self._slots.finish_unplaced(request.id, Finish.LENGTH)
            elif self._stop_text.met(request):
                self._slots.finish_unplaced(request.id, Finish.STOP)
            elif self._slots.keeps(request.session):
                self._start(request)
            else:
                self._queue[request.id] = request

    def abort(self, ids: Iterable[int]) -> None:
        """Ends these requests with ABORTED; ids that are not in work are skipped."""
        for request_id in ids:
            slot = self._slots.slot_of(request_id)
            if slot is not None:
                self._end(slot, Finish.ABORTED)
            elif self._queue.pop(request_id, None):
                self._slots.finish_unplaced(request_id, Finish.ABORTED)

    def release(self, sessions: Iterable[int]) -> None:
        """Frees the slots and blocks of sessions that have ended."""
        gone = list(sessions)
        for slot in self._slots.release(gone):
            self._memory.free(slot)
        self.loads.release(gone)

    def drain(self, ended_only: bool = False) -> Flush | None:
        """The tokens since the last drain, each once; None: there are none. `ended_only` leaves out
        requests that still run.
        """
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
        if self._paused or not self._able:
            return False
        began = self._clock.monotonic()
        while self._queue and self._slots.available():
            self._start(self._queue.pop(next(iter(self._queue))))
        self.loads.take()
        steps = 1 if self._joining or self._stop_text else self._steps
        self._hold_room(steps)
        if self._joining:  # somebody had to give way: room is only sure for one step
            steps = 1
        joining, counts = self._plan()
        rows = self._decoding_rows()
        if not len(rows) and not joining:
            return False
        self._run(rows, joining, counts, 1 if joining else steps)
        self.busy_s += self._clock.monotonic() - began
        return True

    def _run(
        self, rows: NDArray[np.int64], joining: list[int], stretches: list[int], steps: int
    ) -> None:
        slots = self._slots
        counts = np.ones(len(rows) + len(joining), np.int64)
        if joining:
            counts[len(rows) :] = stretches
            rows = np.concatenate((rows, np.array(joining, np.int64)))
        before, computed = slots.known[rows], slots.computed[rows]
        began = self._clock.monotonic()
        sampled = self._compute.run(rows, counts, steps, self._budget_s)
        took = self._clock.monotonic() - began
        self.compute_s += took
        if joining:
            self._prefill_rate.add(sum(stretches), int(counts.sum()), took)
        self.tokens_generated += sampled
        self.steps += max(1, sampled // len(rows))
        self.tokens_computed += int((slots.computed[rows] - computed).sum())
        grew = slots.known[rows] > before
        first = slots.first_sampled[rows]
        slots.first_sampled[rows] = np.where(grew, np.minimum(first, before), first)
        for slot in joining:
            self._memory.publish(slot, tail=True)
            self.loads.meet(slot)
            ahead = slots.known[slot] - slots.computed[slot]
            if ahead < self._stretch and slot not in self.loads:
                self._set_joining(slot, False)
                self.loads.keep(slot, lost=False)
        if self._stop_text:
            self._stop_text.look(slots)
        for slot in rows[slots.finish[rows] != Finish.RUNNING].tolist():
            self._end(slot, Finish(slots.finish[slot]))

    def _plan(self) -> tuple[list[int], list[int]]:
        """Joining slots of this step, oldest first, and how many of their tokens it computes. Those
        whose prefix is being loaded get what the others leave of the budget.
        """
        slots, budget = self._slots, PREFILL_TOKENS
        chosen: list[int] = []
        counts: list[int] = []
        led: list[int] = []  # who computes or loads what others could share
        full = False  # somebody has no room: nobody who came later takes any
        loading = set(self.loads.under_way)
        for slot in self._in_turn():
            if budget <= 0:
                break
            if slot in loading and slot not in self.loads:
                continue  # it gave way in this very step: it takes nothing from who is chosen
            if slot not in self.loads:
                if full:
                    continue
                self._memory.share(slot)
            if self._follows(slot, led):
                continue
            older = int((self._decoding & (self._started < self._started[slot])).sum())
            if not self._make_room(slot, int(slots.known[slot]), spare=older):
                full = True
                continue
            load = self.loads.of(slot)
            ahead = int(slots.known[slot] - slots.computed[slot])
            if load is None and ahead < self._stretch and not self._leads(slot):
                self._set_joining(slot, False)
                continue
            led.append(slot)
            count = min(ahead, budget)
            if load is not None:
                count = self.loads.front(slot, load, count, self.prefill_tokens_per_s)
            if count:
                budget -= count
                chosen.append(slot)
                counts.append(count)
        return chosen, counts

    def _in_turn(self) -> list[int]:
        """Joining slots in the order in which they get tokens of a step: first those for whom
        nothing comes, oldest first."""
        return sorted(self._joining, key=self.loads.__contains__)

    def _follows(self, slot: int, chosen: list[int]) -> bool:
        """Whether a slot of this step is computing what this one could share afterwards."""
        if not chosen:
            return False
        tokens, end = self._slots.tokens, int(self._slots.known[slot]) - 1
        least = int(self._slots.computed[slot]) + SHARE_FROM
        if end < least:
            return False
        same = (tokens[chosen, :least] == tokens[slot, :least]).all(1)
        same &= self._slots.adapter[chosen] == self._slots.adapter[slot]
        return bool((same & (self._slots.known[chosen] > least)).any())

    def _leads(self, slot: int) -> bool:
        """Whether the slot that joins next could share what this one would compute."""
        following = self._joining.index(slot) + 1
        return following < len(self._joining) and self._follows(self._joining[following], [slot])

    def _decoding_rows(self) -> NDArray[np.int64]:
        if self._rows is None:
            self._rows = np.flatnonzero(self._decoding)
        return self._rows

    def _hold_room(self, steps: int) -> None:
        """Makes room for the next tokens of the decoding slots; the youngest may have to wait."""
        while True:
            rows = self._decoding_rows()
            ends = np.minimum(self._slots.computed[rows] + steps, self._slots.limit[rows])
            short = self._memory.short(rows, ends)
            if not len(short):
                return
            slot = int(short[np.argmin(self._started[short])])
            if not self._make_room(slot, int(ends[rows == slot][0])):
                self._preempt(slot)

    # -- the cache -------------------------------------------------------------------------------

    def _make_room(self, slot: int, tokens: int, spare: int = 0) -> bool:
        """Room for a slot's first `tokens` tokens and `spare` blocks beside, if need be at the cost
        of idle sessions, then of the youngest requests; False when only older ones are left."""
        while not self._memory.grow(slot, tokens, spare):
            idle = [i for i in self._slots.idle() if self._slots.computed[i]]
            if idle:
                self._drop(idle[0])
                continue
            holders = [
                i
                for i in self._slots.live()
                if self._has_room(i) and self._started[i] > self._started[slot]
            ]
            if not holders:
                return False
            self._preempt(max(holders, key=lambda i: self._started[i]))
        return True

    def _has_room(self, slot: int) -> bool:
        """Whether a slot has anything in the cache, or room for what it loads."""
        return bool(self._slots.computed[slot]) or slot in self.loads

    def _drop(self, slot: int, keep: bool = True) -> None:
        self.loads.stop(slot)
        if keep:
            self.loads.keep(slot, lost=True)
        self._memory.free(slot)
        self._slots.computed[slot] = 0
        self._slots.weights[slot] = self._slots.current(slot)
        if slot in self._joining:
            self.loads.unsought.add(slot)

    def _preempt(self, slot: int) -> None:
        """The slot's request gives up its cache; it is computed again when there is room."""
        self.preempted += 1
        self._drop(slot)
        self._set_joining(slot, True)

    def _start(self, request: Request) -> None:
        victim = self._slots.victim(request.session)
        if victim is not None:
            self.loads.keep(victim, lost=True)
        slot = self._slots.place(request, self._places[request.adapter])
        self._memory.place(slot)
        self._stop_text.place(slot, request)
        self._starts += 1
        self._started[slot] = self._starts
        self._set_joining(slot, True)

    def _end(self, slot: int, code: Finish) -> None:
        self._decoding[slot] = False
        self._rows = None
        self.loads.stop(slot)
        if slot in self._joining:
            self._joining.remove(slot)
            self.loads.unsought.discard(slot)
        self._stop_text.end(slot)
        self._memory.publish(slot, tail=False)
        if not self._slots.computed[slot]:
            self._memory.free(slot)  # room for what was to be loaded
        for freed in self._slots.end(slot, code):
            self._memory.free(freed)

    def _set_joining(self, slot: int, joining: bool) -> None:
        self._decoding[slot] = not joining
        self._rows = None
        if not joining:
            self._joining.remove(slot)
            self.loads.unsought.discard(slot)
            self.loads.withdraw(int(self._slots.session[slot]))
            return
        self.loads.unsought.add(slot)
        if slot not in self._joining:
            insort(self._joining, slot, key=lambda i: self._started[i])

    # -- sessions that move ----------------------------------------------------------------------

    def cached(self, session: int) -> SessionCache | None:
        """What it has computed of an idle session; None: nothing that could be taken over."""
        slot = self._slots.idle_slot(session)
        if slot is None or not self._able:
            return None
        adapter = self._names()[int(self._slots.adapter[slot])]
        return cached(self._slots, slot, self._compute.layout, adapter)

    def copied(self, session: int, start: int, end: int) -> NDArray[np.uint8] | None:
        """A copy of the keys and values of tokens [start, end) of an idle session; None: it has
        them no more.
        """
        slot = self._slots.idle_slot(session)
        if slot is None or not self._able or self._slots.computed[slot] < end:
            return None
        return self._compute.read(slot, start, end)

    def expect(self, session: int, load: Loading) -> None:
        """The session's next request, or the one that is being prefilled, may be loaded by `load`:
        an `offer` follows, or its end.
        """
        self.loads.expect(session, load)

    def offer(self, session: int, cache: SessionCache, load: Loading) -> bool:
        """Tells what `load` brings, which may be expected already. False, and it is cancelled: it
        must not or cannot be used.
        """
        return self.loads.offer(session, cache, load)

    def keep_all(self) -> None:
        """Offers all that slots have computed to who keeps it elsewhere: the engine goes away."""
        self.loads.keep_all()

    # -- weights ---------------------------------------------------------------------------------

    @property
    def _able(self) -> bool:
        """Whether a whole version is in place."""
        return not self._asleep and self.version != NO_VERSION and not self._broken

    def quarantine(self) -> None:
        """It computes nothing until it gets a whole version."""
        self.version = NO_VERSION

    def swap(self, state: Mapping[str, Tensor], version: int) -> None:
        """What slots have cached stays, unless the engine was told to recompute; where none of a
        slot's tokens was sampled here yet it goes in any case: see `Slots.forget_unsampled`.
        """
        check_shapes(state, self._shapes)
        self._replace(state, version)

    def _replace(self, state: Mapping[str, Tensor], version: int) -> None:
        if not self._asleep:
            with replacing(version, self.quarantine):
                self._compute.load(state)
                if self._read_back and (odd := self._compute.differing(state)):
                    raise Damaged(f"{len(odd)} tensors are not what was put there: {odd[0]}")
        slots = self._slots
        self.version = slots.loaded[0] = version
        for slot in list(self.loads.under_way):  # what is on its way is of the weights before
            self._drop(slot, keep=False)
        self.loads.withdraw_all()
        for place in self._places.values():
            self._number(place)
        self._memory.forget()
        # An adapter's version stays, so its tokens would not tell.
        self._recomputed((slots.adapter > 0) | self._outdated())

    def _number(self, place: int) -> None:
        """Other weights have come for what is computed with the adapter in `place`."""
        self._numbered += 1
        self._slots.numbers[place] = self._numbered

    def _outdated(self) -> NDArray[np.bool_]:
        """Slots [slots] whose cache goes if other weights come."""
        every = np.ones(self._slots.count, np.bool_)
        return every if self._recompute else self._slots.unsampled()

    def _recomputed(self, gone: NDArray[np.bool_]) -> None:
        """Slots [slots] that lose their cache, because there are other weights."""
        for slot in self._slots.forget(gone):
            self._memory.free(slot)
        for slot in np.flatnonzero(self._decoding & (self._slots.computed == 0)).tolist():
            self._set_joining(slot, True)

    # -- adapters --------------------------------------------------------------------------------

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int
    ) -> None:
        """Puts an adapter, or a new version of one, beside the base. What slots have cached with
        its last version stays as over `swap`. Refused when it does not fit, or no place is left;
        Quarantined when it broke off, and then the engine stands until it is loaded as a whole.
        """
        changes = changes_of(self._config, tensors, scale)
        taken = self._places.values()
        place = self._places.get(name) or next(
            (i for i in range(1, MOST_ADAPTERS + 1) if i not in taken), 0
        )
        if not name or not place:
            raise Refused(
                f"adapter {name!r} has no place beside {len(taken) - 1} others",
                where="engine",
                fix=f"an engine takes {MOST_ADAPTERS} with names: unload one",
            )

        def quarantine() -> None:
            if name in self._places:
                self._broken.add(place)
            else:
                self._compute.drop_adapter(place)

        with replacing(version, quarantine):
            self._compute.load_adapter(place, changes)
        self._broken.discard(place)
        self._places[name] = place
        self._slots.loaded[place] = version
        for slot in [i for i in self.loads.under_way if self._slots.adapter[i] == place]:
            self._drop(slot, keep=False)
        self.loads.withdraw_all()
        self._number(place)
        self._recomputed((self._slots.adapter == place) & self._outdated())

    def unload_adapter(self, name: str) -> None:
        """Frees an adapter. Refused while requests with it are in work."""
        place = self._places.get(name)
        if not place:
            return
        slots = self._slots
        waits = any(request.adapter == name for request in self._queue.values())
        if waits or (slots.adapter[slots.live()] == place).any():
            raise in_use(name)
        for slot in np.flatnonzero(slots.adapter == place).tolist():
            self._drop(slot, keep=False)
            slots.adapter[slot] = 0  # the place may be another's, whose cache this never is
        self._compute.drop_adapter(place)
        self._broken.discard(place)
        self.loads.withdraw_all()
        del self._places[name]

    def _names(self) -> dict[int, str]:
        return {place: name for name, place in self._places.items()}

    def sleep(self) -> None:
        """Gives back weights and cache; what is known stays, and is computed again on waking."""
        if self._asleep:
            return
        self._asleep = True
        self.keep_all()
        for slot in range(self._slots.count):
            self._drop(slot, keep=False)
        self._memory.forget()
        for slot in np.flatnonzero(self._decoding).tolist():
            self._set_joining(slot, True)
        self._compute.sleep()

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        """Takes back the memory that `sleep` gave away and loads weights of `version`. Refused if
        their shapes differ.
        """
        check_shapes(state, self._shapes)
        if self._asleep:
            self._compute.wake()
            self._asleep = False
        self._replace(state, version)

    def score(self, tokens: Ints, adapter: str = "") -> NDArray[np.float32]:
        """Log-probabilities at temperature 1 of all tokens but the first: float32 [n - 1]. Refused
        if the engine sleeps or the sequence does not fit.
        """
        row = np.asarray(tokens, np.int32)
        asked = Request(-1, row, 0, 1.0, (), 0, -1, adapter=adapter)
        check(asked, self._compute.vocab_size, self._places, self._config.absent_ids)
        if not self._able:
            raise no_weights()
        if len(tokens) > self._slots.max_length:
            raise too_long(len(tokens), self._slots.max_length)
        while (blocks := self._memory.borrow(len(tokens))) is None:
            holders = [i for i in range(self._slots.count) if self._has_room(i)]
            if not holders:
                raise Refused(
                    f"{len(tokens)} tokens do not fit the cache",
                    where="engine",
                    fix="raise rollout.kv_tokens",
                )
            idle = [i for i in holders if i in self._slots.idle()]
            youngest = max(holders, key=lambda i: self._started[i])
            self._drop(idle[0]) if idle else self._preempt(youngest)
        try:
            return self._compute.score(row, blocks, self._places[adapter])
        finally:
            self._memory.give_back(blocks)
