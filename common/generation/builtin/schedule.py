"""The schedule of the built-in engine: which slots compute in a step, and which give way."""

from __future__ import annotations

from bisect import insort

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import Finish
from meshrl.common.base.clock import Clock
from meshrl.common.generation.batch.paged import PagedMemory
from meshrl.common.generation.batch.parts import StepCompute
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.builtin.loaded import LoadedWeights
from meshrl.common.generation.builtin.prefix_loads import PrefixLoads
from meshrl.common.generation.builtin.stop_text import StopText
from meshrl.common.generation.contract import Request

SHARE_FROM = 6  # common tokens from which taking over a neighbour's beats computing them
STRETCH = 2  # tokens to compute from which a slot joins: each is a row of the same step
HALF_LIFE = 8192  # tokens after which a measured rate counts half: engines warm up, contexts grow
PREFILL_TOKENS = 512  # known tokens in a step, so that decoding rows do not wait for long


class PrefillRate:
    """A running average over steps in which stretches of known tokens were computed: how fast that
    is, and so what recomputing a cache would take.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Known tokens computed in a second; 0: nothing is measured yet."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def add(self, tokens: int, rows: int, seconds: float) -> None:
        """A step of `rows` tokens, `tokens` of them in stretches. The time is shared out evenly: a
        token is a row, whether it was known or is decoded."""
        if not seconds:
            return  # less than the clock can tell
        fade = 0.5 ** (tokens / HALF_LIFE)
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds * tokens / rows


class Schedule:
    """The slots of one engine that run requests: those that decode, a token a step, and those that
    join, which have more tokens to compute. The older ones go first.
    """

    def __init__(
        self,
        slots: Slots,
        compute: StepCompute,
        memory: PagedMemory,
        weights: LoadedWeights,
        stop_text: StopText,
        clock: Clock,
        *,
        mixed: bool,
    ) -> None:
        """`mixed`: caches of several versions are allowed."""
        self.preempted = 0  # requests that gave up their cache to older ones
        self.prefill = PrefillRate()
        self.joining: list[int] = []  # slots with more than one token to compute, oldest first
        self._slots, self._memory, self._weights = slots, memory, weights
        self._stop_text = stop_text
        self._started = np.zeros(slots.count, np.int64)  # when: the older go first
        self._starts = 0
        self._decodes = np.zeros(slots.count, bool)
        self._rows: NDArray[np.int64] | None = None  # the decoding slots, ascending; None: changed
        about = slots, compute, memory, clock, self.joining, weights
        self.loads = PrefixLoads(*about, mixed=mixed)

    def plan(self) -> tuple[list[int], list[int]]:
        """Joining slots of this step, oldest first, and how many of their tokens it computes. Those
        whose prefix is being loaded get what the others leave of the budget.
        """
        slots, budget = self._slots, PREFILL_TOKENS
        chosen: list[int] = []
        counts: list[int] = []
        led: list[int] = []  # who computes or loads what others could share
        full = False  # somebody has no room: nobody who came later takes any
        loading = set(self.loads.under_way)
        for slot in sorted(self.joining, key=self.loads.__contains__):
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
            older = int((self._decodes & (self._started < self._started[slot])).sum())
            if not self._make_room(slot, int(slots.known[slot]), spare=older):
                full = True
                continue
            load = self.loads.of(slot)
            ahead = int(slots.known[slot] - slots.computed[slot])
            if load is None and ahead < STRETCH and not self._leads(slot):
                self.set_joining(slot, False)
                continue
            led.append(slot)
            count = min(ahead, budget)
            if load is not None:
                count = self.loads.front(slot, load, count, self.prefill.tokens_per_s)
            if count:
                budget -= count
                chosen.append(slot)
                counts.append(count)
        return chosen, counts

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
        following = self.joining.index(slot) + 1
        return following < len(self.joining) and self._follows(self.joining[following], [slot])

    @property
    def rows(self) -> NDArray[np.int64]:
        """The slots that decode, ascending."""
        if self._rows is None:
            self._rows = np.flatnonzero(self._decodes)
        return self._rows

    def hold_room(self, steps: int) -> None:
        """Makes room for the next tokens of the decoding slots; the youngest may have to wait."""
        while True:
            rows = self.rows
            ends = np.minimum(self._slots.computed[rows] + steps, self._slots.limit[rows])
            short = self._memory.short(rows, ends)
            if not len(short):
                return
            slot = int(short[np.argmin(self._started[short])])
            if not self._make_room(slot, int(ends[rows == slot][0])):
                self.preempt(slot)

    def _make_room(self, slot: int, tokens: int, spare: int = 0) -> bool:
        """Room for a slot's first `tokens` tokens and `spare` blocks beside, if need be at the cost
        of idle sessions, then of the youngest requests; False when only older ones are left."""
        while not self._memory.grow(slot, tokens, spare):
            idle = [i for i in self._slots.idle() if self._slots.computed[i]]
            if idle:
                self.drop(idle[0])
                continue
            holders = [
                i
                for i in self._slots.live()
                if self._has_room(i) and self._started[i] > self._started[slot]
            ]
            if not holders:
                return False
            self.preempt(max(holders, key=lambda i: self._started[i]))
        return True

    def _has_room(self, slot: int) -> bool:
        """Whether a slot has anything in the cache, or room for what it loads."""
        return bool(self._slots.computed[slot]) or slot in self.loads

    def drop(self, slot: int, keep: bool = True) -> None:
        """Has a slot lose its cache; `keep`: it is offered first to what keeps it elsewhere."""
        self.loads.stop(slot)
        if keep:
            self.loads.keep(slot, lost=True)
        self._memory.free(slot)
        self._slots.computed[slot] = 0
        self._slots.weights[slot] = self._slots.current(slot)
        if slot in self.joining:
            self.loads.unsought.add(slot)

    def preempt(self, slot: int) -> None:
        """The slot's request gives up its cache; it is computed again when there is room."""
        self.preempted += 1
        self.drop(slot)
        self.set_joining(slot, True)

    def start(self, request: Request) -> None:
        """Gives a request a slot, for which an idle session may go."""
        victim = self._slots.victim(request.session)
        if victim is not None:
            self.loads.keep(victim, lost=True)
        slot = self._slots.place(request, self._weights.places[request.adapter])
        self._memory.place(slot)
        self._stop_text.place(slot, request)
        self._starts += 1
        self._started[slot] = self._starts
        self.set_joining(slot, True)

    def end(self, slot: int, code: Finish) -> None:
        """Ends a slot's request."""
        self._decodes[slot] = False
        self._rows = None
        self.loads.stop(slot)
        if slot in self.joining:
            self.joining.remove(slot)
            self.loads.unsought.discard(slot)
        self._stop_text.end(slot)
        self._memory.publish(slot, tail=False)
        if not self._slots.computed[slot]:
            self._memory.free(slot)  # room for what was to be loaded
        for freed in self._slots.end(slot, code):
            self._memory.free(freed)

    def set_joining(self, slot: int, joining: bool) -> None:
        """Has a slot join, as it has tokens to compute again, or decode from now on."""
        self._decodes[slot] = not joining
        self._rows = None
        if not joining:
            self.joining.remove(slot)
            self.loads.unsought.discard(slot)
            self.loads.withdraw(int(self._slots.session[slot]))
            return
        self.loads.unsought.add(slot)
        if slot not in self.joining:
            insort(self.joining, slot, key=lambda i: self._started[i])

    def forget(self, gone: NDArray[np.bool_]) -> None:
        """Has slots [slots] lose their cache, because there are other weights."""
        for slot in self._slots.forget(gone):
            self._memory.free(slot)
        self.compute_again(self._slots.computed == 0)

    def compute_again(self, slots: NDArray[np.bool_]) -> None:
        """Has those of `slots` [slots] join that decode."""
        for slot in np.flatnonzero(self._decodes & slots).tolist():
            self.set_joining(slot, True)

    def borrow(self, tokens: int) -> NDArray[np.int64] | None:
        """Blocks for so many tokens, if need be at the cost of slots, the idle ones first; None:
        the cache is too small.
        """
        while (blocks := self._memory.borrow(tokens)) is None:
            holders = [i for i in range(self._slots.count) if self._has_room(i)]
            if not holders:
                return None
            idle = [i for i in holders if i in self._slots.idle()]
            youngest = max(holders, key=lambda i: self._started[i])
            self.drop(idle[0]) if idle else self.preempt(youngest)
        return blocks
