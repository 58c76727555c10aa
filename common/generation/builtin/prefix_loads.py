"""Prefixes that an engine's slots load in place of computing them, and what the slots let go of.

Chunks are put where they belong between two steps, ahead of what the slot has computed and with
holes between them; the slot jumps over them when it gets there.

A token tells which weights sampled it; what an engine takes over must not let tokens of one version
follow a cache of another without an earlier token that shows it. So a cache is taken over if the
very weights that are loaded here computed all of it, or, where mixed caches are allowed, if a token
in it was sampled under other weights than these: then it is as if the session had stayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from meshrl.common.base.clock import Clock
from meshrl.common.generation.batch.paged import PagedMemory
from meshrl.common.generation.batch.parts import StepCompute
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.builtin.loaded import LoadedWeights
from meshrl.common.generation.contract import MIXED, SessionCache
from meshrl.common.generation.loading import WORTH, KeptPrefix, Loading, Origin, Prefixes, Sought

OLDER = -1  # number of the weights of a cache that these weights did not compute, or not all of it
MOST_OFFERED = 16  # sessions whose caches come before their requests
STOP_S = 0.05  # to copy what a slot lets go of, while others decode
LEAVE_S = 2.0  # to copy what all slots have computed, when nothing decodes any more


class PrefixLoads:
    """Those of one engine. `joining` are its slots that prefill. `mixed`: caches of several
    versions are allowed.
    """

    def __init__(
        self,
        slots: Slots,
        compute: StepCompute,
        memory: PagedMemory,
        clock: Clock,
        joining: Sequence[int],
        weights: LoadedWeights,
        *,
        mixed: bool,
    ) -> None:
        self.prefixes: Prefixes | None = None  # where caches are kept that have no room here
        self.unsought: set[int] = set()  # joining slots whose prefix was not looked for yet
        self.under_way: dict[int, Loading] = {}  # by slot
        self.offered: dict[int, Loading] = {}  # by session, whose request is not here yet
        self._slots, self._compute, self._memory, self._clock = slots, compute, memory, clock
        self._joining, self._weights, self._mixed = joining, weights, mixed

    def __contains__(self, slot: int) -> bool:
        return slot in self.under_way

    def release(self, sessions: Sequence[int]) -> None:
        """These sessions have ended."""
        for session in sessions:
            self.withdraw(session)
        if self.prefixes is not None:
            self.prefixes.release(sessions)

    def expect(self, session: int, load: Loading) -> None:
        """The session's next request, or the one that is being prefilled, may be loaded by `load`:
        an `offer` follows, or its end.
        """
        self.withdraw(session)
        slots = self._slots
        running = [slot for slot in slots.live() if slots.session[slot] == session]
        late = bool(running) and running[0] not in self._joining
        if session < 0 or late or not self._weights.able:
            load.cancelled = True
            return
        self.offered[session] = load
        while len(self.offered) > MOST_OFFERED:
            self.withdraw(next(iter(self.offered)))

    def offer(self, session: int, cache: SessionCache, load: Loading) -> bool:
        """Tells what `load` brings, which may be expected already. False, and it is cancelled: it
        must not or cannot be used.
        """
        if load.cancelled or not self._takes(cache, load):
            load.cancelled = True
            return False
        load.cache = cache
        load.end = len(cache.tokens)
        slot = next((slot for slot, known in self.under_way.items() if known is load), None)
        if slot is not None:
            del self.under_way[slot]
            self._begin(slot, load)
        elif self.offered.get(session) is not load:
            self.expect(session, load)
        return not load.cancelled

    def _takes(self, cache: SessionCache, load: Loading) -> bool:
        slots, place = self._slots, self._weights.places.get(cache.adapter)
        fits = cache.layout == self._compute.layout and len(cache.tokens) < slots.max_length
        if place is None or not self._weights.able or not fits:
            return False
        version = int(slots.loaded[place])
        if load.alone:
            return self._mixed and shown(cache, version)
        return cache.version == version

    def withdraw(self, session: int) -> None:
        """Nothing more is wanted of what was to come of a session."""
        load = self.offered.pop(session, None)
        if load is not None:
            load.cancelled = True

    def withdraw_all(self) -> None:
        """Other weights have come than what is on its way was taken for."""
        for session in list(self.offered):
            self.withdraw(session)

    def of(self, slot: int) -> Loading | None:
        """What is on its way of the slot's prefix: from another engine, or what is found in a look
        of which each slot has one.
        """
        load = self.under_way.get(slot)
        if load is None:
            load = self.offered.pop(int(self._slots.session[slot]), None)
            if load is None and slot in self.unsought:
                self.unsought.discard(slot)
                load = self._found(slot)
            if load is not None:
                self._begin(slot, load)
        return self.under_way.get(slot)

    def _found(self, slot: int) -> Loading | None:
        slots = self._slots
        known, computed = int(slots.known[slot]), int(slots.computed[slot])
        if self.prefixes is None or known - 1 - computed < WORTH:
            return None
        adapter = self._weights.name(int(slots.adapter[slot]))
        tokens = slots.tokens[slot, :known].astype(np.int32)
        session = int(slots.session[slot])
        return self.prefixes.find(Sought(tokens, computed, session, adapter))

    def _begin(self, slot: int, load: Loading) -> None:
        """Has a slot's prefix loaded, if it fits behind what the slot has computed."""
        slots = self._slots
        computed, known = int(slots.computed[slot]), int(slots.known[slot])
        pure = not load.alone and slots.weights[slot] == slots.current(slot)
        load.claimed = computed
        load.end = min(load.end, known - 1)
        fits = load.end > computed and (pure or not computed)
        if load.alone and load.origin is not None:
            loaded = slots.loaded[slots.adapter[slot]]
            fits &= load.origin.first_version != loaded  # else no token shows the mixture
        if fits and load.cache is not None:
            n = min(len(load.cache.tokens), known)
            fits = bool((slots.tokens[slot, :n] == load.cache.tokens[:n]).all())
            fits &= self._weights.places.get(load.cache.adapter) == slots.adapter[slot]
        load.cancelled = not fits
        if fits:
            self.under_way[slot] = load
            self._take_load(slot, load)

    def front(self, slot: int, load: Loading, most: int, tokens_per_s: float) -> int:
        """How many tokens the engine computes now of a slot that is being loaded."""
        computed, now_s = int(self._slots.computed[slot]), self._clock.monotonic()
        if load.alone and load.stalled(now_s):
            self.stop(slot)
            return most
        count = load.stretch(computed, most, tokens_per_s, now_s)
        load.claimed = max(load.claimed, computed + count)
        return count

    def take(self) -> None:
        """Puts what has come where it belongs, as far as there is room."""
        for slot, load in list(self.under_way.items()):
            if not len(self._memory.short(np.array([slot]), self._slots.known[[slot]])):
                self._take_load(slot, load)

    def _take_load(self, slot: int, load: Loading) -> None:
        for start, end, content in load.take(self._clock.monotonic()):
            right = len(content) == self._compute.span_bytes(start, end)
            room = not len(self._memory.short(np.array([slot]), np.array([end])))
            if right and room and load.claimed <= start < load.end:
                self._compute.write(slot, start, end, content)
                load.placed[start] = min(end, load.end)
        self.meet(slot)

    def meet(self, slot: int) -> None:
        """Jumps over what has come, where the slot's computed tokens reach it."""
        load, slots = self.under_way.get(slot), self._slots
        if load is None:
            return
        computed = int(slots.computed[slot])
        reached = load.reach(computed)
        if reached > computed:
            slots, origin = self._slots, load.origin
            if load.alone:
                slots.weights[slot] = OLDER
            sampled = origin is not None and origin.first_sampled < reached
            if origin is not None and sampled and slots.first_sampled[slot] > origin.first_sampled:
                slots.first_sampled[slot] = origin.first_sampled
                slots.versions[slot, origin.first_sampled] = origin.first_version
            slots.computed[slot] = load.claimed = reached
            self._memory.publish(slot, tail=True)
        if load.ended(reached):
            self.stop(slot)

    def stop(self, slot: int) -> None:
        """Nothing more is wanted of what is on its way to a slot."""
        load = self.under_way.pop(slot, None)
        if load is not None:
            load.cancelled = True

    def keep(self, slot: int, lost: bool, stop_s: float = STOP_S) -> None:
        """Offers what a slot has computed to who keeps it elsewhere."""
        slots = self._slots
        n = int(slots.computed[slot])
        if self.prefixes is None or n < WORTH or not self._weights.whole:
            return
        pure = bool(slots.weights[slot] == slots.current(slot))
        first = min(int(slots.first_sampled[slot]), n)
        own = int(slots.loaded[slots.adapter[slot]])
        version = int(slots.versions[slot, first]) if first < n else own
        kept = KeptPrefix(
            tokens=slots.tokens[slot, :n].astype(np.int32),
            session=int(slots.session[slot]),
            adapter=self._weights.name(int(slots.adapter[slot])),
            pure=pure,
            lost=lost,
            stop_s=stop_s,
            origin=Origin(first, version),
            read=partial(self._compute.read, slot),
        )
        self.prefixes.keep(kept)

    def keep_all(self) -> None:
        """Offers all that slots have computed to who keeps it elsewhere: the engine goes away."""
        until_s = self._clock.monotonic() + LEAVE_S
        for slot in range(self._slots.count):
            left_s = until_s - self._clock.monotonic()
            if left_s > 0:
                self.keep(slot, lost=True, stop_s=left_s)


def cached(slots: Slots, slot: int, layout: str, adapter: str) -> SessionCache | None:
    """What a slot has computed, with the adapter of this name; None: nothing that another engine
    could take over.
    """
    n = int(slots.computed[slot])
    first = min(int(slots.first_sampled[slot]), n)
    mixed = bool(slots.weights[slot] != slots.current(slot))
    version = int(slots.loaded[slots.adapter[slot]])
    if not n or (mixed and first == n):
        return None
    return SessionCache(
        tokens=slots.tokens[slot, :n].astype(np.int32),
        layout=layout,
        version=MIXED if mixed else version,
        first_sampled=first,
        first_version=int(slots.versions[slot, first]) if first < n else version,
        adapter=adapter,
    )


def shown(cache: SessionCache, version: int) -> bool:
    """Whether a token of a cache tells that it is of other weights than this version's."""
    return cache.first_sampled < len(cache.tokens) and cache.first_version != version
