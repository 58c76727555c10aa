"""Export and import of a session's keys and values, when it moves from one engine to another.

A token tells which weights sampled it; what an engine takes over must not let tokens of one version
follow a cache of another without an earlier token that shows it. So a cache is taken over if the
very weights that are loaded here computed all of it, or, where mixed caches are allowed, if a token
in it was sampled under other weights than these: then it is as if the session had stayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from common.generation.builtin.blocks import BLOCK
from common.generation.builtin.parts import Memory, StepCompute
from common.generation.builtin.slots import Slots
from common.generation.contract import MIXED, SessionCache

OLDER = -1  # number of the weights of a cache that these weights did not compute, or not all of it


class SessionCaches:
    """Exports and adopts sessions. `keep`: caches of several versions are allowed. `drop` takes an
    idle slot's cache away.
    """

    def __init__(
        self,
        slots: Slots,
        compute: StepCompute,
        memory: Memory,
        keep: bool,
        drop: Callable[[int], None],
    ) -> None:
        self._slots, self._compute, self._memory = slots, compute, memory
        self._keep, self._drop = keep, drop

    def export(
        self, session: int, start: int, most_bytes: int, names: Mapping[int, str]
    ) -> SessionCache | None:
        """A copy of what an idle session has computed from token `start` on, of about `most_bytes`;
        None: nothing that another engine could take over. `names` are those of adapters, by place.
        """
        slots = self._slots
        slot = slots.idle_slot(session)
        n = int(slots.computed[slot]) if slot is not None else 0
        if slot is None or start >= n:
            return None
        first = min(int(slots.first_sampled[slot]), n)
        mixed = bool(slots.weights[slot] != slots.current(slot))
        adapter = int(slots.adapter[slot])
        version = int(slots.loaded[adapter])
        if mixed and first == n:
            return None  # nobody could take it over
        blocks = max(1, most_bytes // (BLOCK * self._compute.cache_bytes_per_token))
        end = min(n, start + blocks * BLOCK)
        return SessionCache(
            tokens=slots.tokens[slot, :n].astype(np.int32),
            content=self._compute.read(slot, start, end),
            start=start,
            end=end,
            layout=self._compute.layout,
            version=MIXED if mixed else version,
            first_sampled=first,
            first_version=int(slots.versions[slot, first]) if first < n else version,
            adapter=names[adapter],
        )

    def adopt(self, session: int, cache: SessionCache, adapter: int, spare: int) -> bool:
        """Takes a part of a session's cache, computed with the adapter in place `adapter`, into a
        slot; False if it must not or cannot be taken over. `spare` blocks are left to requests that
        run.
        """
        slots = self._slots
        weights = self._weights(cache, int(slots.numbers[adapter]), int(slots.loaded[adapter]))
        if weights is None or not self._fits(cache) or session < 0 or slots.runs(session):
            return False
        begun = cache.start > 0
        slot = slots.idle_slot(session) if begun else self._reserve(session, cache, adapter, spare)
        if slot is None or slots.computed[slot] != cache.start or slots.adapter[slot] != adapter:
            return False
        n = len(cache.tokens)
        if slots.known[slot] != n or (slots.tokens[slot, :n] != cache.tokens).any():
            return False
        self._compute.write(slot, cache.start, cache.end, cache.content)
        slots.computed[slot] = cache.end
        slots.weights[slot] = min(weights, slots.weights[slot]) if begun else weights
        self._memory.publish(slot, tail=False)
        return True

    def _weights(self, cache: SessionCache, number: int, version: int) -> int | None:
        """What `Slots.weights` says of the cache; None: it must not be taken over."""
        if cache.version == version:
            return number
        shown = cache.first_sampled < len(cache.tokens) and cache.first_version != version
        return OLDER if self._keep and shown else None

    def _fits(self, cache: SessionCache) -> bool:
        """Whether the part is one of ours, and leaves its slot a token to generate."""
        start, end, n = cache.start, cache.end, len(cache.tokens)
        return (
            cache.layout == self._compute.layout
            and 0 <= start < end <= n < self._slots.max_length
            and start % BLOCK == 0
            and (end == n or end % BLOCK == 0)
            and len(cache.content) == self._compute.span_bytes(start, end)
        )

    def _reserve(self, session: int, cache: SessionCache, adapter: int, spare: int) -> int | None:
        """A slot with room for all of the cache, if need be at the cost of idle sessions."""
        slots, memory, n = self._slots, self._memory, len(cache.tokens)
        if not slots.available() or not memory.fits(n, spare, slots.live()):
            return None
        first = cache.first_sampled, cache.first_version
        slot = slots.reserve(session, cache.tokens, *first, adapter)
        memory.free(slot)
        while not memory.grow(slot, n, spare):
            others = [i for i in slots.idle() if i != slot and slots.computed[i]]
            if not others:
                slots.release([session])
                memory.free(slot)
                return None
            self._drop(others[0])
        return slot
