"""The slots of the built-in engine: which request has which, in arrays, without Python per slot."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import Finish
from meshrl.common.base.experts import NO_EXPERTS
from meshrl.common.generation.batch.adapters import MOST_ADAPTERS
from meshrl.common.generation.contract import (
    NO_FLOATS,
    NO_SESSION,
    Flush,
    FlushPiece,
    Request,
    flush_of,
    joined,
)
from meshrl.common.generation.counter import key_of

NOBODY = -1  # request id of a slot that runs nothing


class Slots:
    """Per slot: tokens, of which the first `known` are given or sampled and the first `computed`
    are in the cache. A slot is free, runs a request, or keeps an idle session's tokens until
    another request needs it (the one idle for longest goes first).
    """

    def __init__(self, count: int, max_length: int, experts: int = 0) -> None:
        """`experts`: to which a token is sent, all layers together; 0: the model is dense.

        Weights have a number each time that others come: those of the base, place 0, and of the
        base with each adapter, places from 1 on. A cache is of the weights that made it.
        """
        self.count, self.max_length = count, max_length
        self.tokens = np.zeros((count, max_length), np.int64)
        self.logprobs = np.zeros((count, max_length), np.float32)
        self.unmodified = np.full((count, max_length), np.nan, np.float32)
        self.versions = np.zeros((count, max_length), np.int32)
        # That predicted a sampled token. Pages cost memory when they are first written.
        self.experts = np.zeros((count, max_length, experts), np.int16)
        self.known = np.zeros(count, np.int64)
        self.computed = np.zeros(count, np.int64)
        self.limit = np.zeros(count, np.int64)  # known tokens at which LENGTH ends the request
        self.flushed = np.zeros(count, np.int64)
        self.first_sampled = np.zeros(count, np.int64)  # index; max_length: none sampled here
        self.adapter = np.zeros(count, np.int32)  # place of what the slot is computed with
        self.numbers = np.zeros(MOST_ADAPTERS + 1, np.int64)  # of the weights loaded, by place
        self.loaded = np.full(MOST_ADAPTERS + 1, -1, np.int32)  # their versions, by place
        self.weights = np.zeros(count, np.int64)  # number of those of the cache's first entry
        self.request = np.full(count, NOBODY, np.int64)
        self.session = np.full(count, NO_SESSION, np.int64)
        self.key = np.zeros(count, np.uint64)
        self.temperature = np.ones(count, np.float32)
        self.top_p = np.ones(count, np.float32)
        self.min_p = np.zeros(count, np.float32)
        self.top_k = np.zeros(count, np.int64)
        self.wants_unmodified = np.zeros(count, bool)
        self.finish = np.zeros(count, np.int8)  # why the request that ran last is over
        self.stops = np.full((count, 4), -1, np.int64)  # padded with -1
        self._slot_of: dict[int, int] = {}  # request id -> slot
        self._idle: dict[int, int] = {}  # session -> slot, longest idle first
        self._free = list(range(count))  # heap: low slots first keeps the batch dense
        self._ended: list[FlushPiece] = []

    @property
    def running(self) -> int:
        """The number of requests that have a slot."""
        return len(self._slot_of)

    @property
    def ended(self) -> bool:
        """Whether a request has ended since the last drain."""
        return bool(self._ended)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._slot_of

    def keeps(self, session: int) -> bool:
        """Whether an idle slot holds what was computed of this session."""
        return session in self._idle

    def available(self) -> bool:
        """Whether a request could have a slot now: one is free, or idle and may be reused."""
        return bool(self._free or self._idle)

    def victim(self, session: int) -> int | None:
        """The slot that a request of the session would take from another, idle one; None: it takes
        none."""
        if session in self._idle or self._free or not self._idle:
            return None
        return self._idle[next(iter(self._idle))]

    def current(self, slot: int) -> int:
        """The number of the weights that compute the slot's next token."""
        return int(self.numbers[self.adapter[slot]])

    def place(self, request: Request, adapter: int = 0) -> int:
        """The slot that now runs `request`, with what its session left there counted as computed.

        Where a session goes another way than its cache, only entries of the weights that are loaded
        are kept, since no token would show that they are mixed; none of another adapter's ever.
        """
        slot = self._idle.pop(request.session, -1)
        if slot < 0:
            free = self._free
            slot = heapq.heappop(free) if free else self._idle.pop(next(iter(self._idle)))
            self.computed[slot] = 0
        weights = int(self.numbers[adapter])
        if self.adapter[slot] != adapter:
            self.adapter[slot], self.computed[slot] = adapter, 0
        n, tokens = len(request.tokens), request.tokens
        cached = min(int(self.computed[slot]), n)
        same = tokens[:cached] == self.tokens[slot, :cached]
        kept = cached if same.all() else int(same.argmin())
        # The first token that was sampled over the cache tells of the weights before later ones.
        first = int(self.first_sampled[slot])
        shows = first < n and int(tokens[first]) == int(self.tokens[slot, first])
        goes_on = kept == self.computed[slot] and shows
        if self.weights[slot] != weights and not goes_on:
            kept = 0
        kept = min(kept, n - 1)  # the last token runs again: it is what the next is sampled from
        if kept == 0:
            self.weights[slot] = weights
        if self.first_sampled[slot] >= kept:
            self.first_sampled[slot] = self.max_length
        self.tokens[slot, :n] = tokens
        self.known[slot] = self.flushed[slot] = n
        self.computed[slot] = kept
        self.limit[slot] = min(n + request.max_new, self.max_length)
        self.request[slot], self.session[slot] = request.id, request.session
        self.key[slot], self.temperature[slot] = key_of(request.seed), request.temperature
        self.top_p[slot], self.min_p[slot] = request.top_p, request.min_p
        self.top_k[slot], self.wants_unmodified[slot] = request.top_k, request.unmodified
        self.finish[slot] = Finish.RUNNING
        self._set_stops(slot, request.stop_ids)
        self._slot_of[request.id] = slot
        return slot

    def end(self, slot: int, code: Finish) -> list[int]:
        """Ends the slot's request; its session, if it has one, keeps the slot idle. The slots that
        this frees."""
        request, session = int(self.request[slot]), int(self.session[slot])
        self._ended.append(self._piece(slot, code))
        del self._slot_of[request]
        self.request[slot] = NOBODY
        if session < 0:
            self._give_back(slot)
            return [slot]
        freed = [self._idle.pop(session)] if session in self._idle else []
        for other in freed:
            self._give_back(other)
        self._idle[session] = slot
        return freed

    def finish_unplaced(self, request_id: int, code: Finish) -> None:
        """Ends a request that never had a slot, with finish code `code` and no tokens."""
        none = np.zeros(0, np.int64)
        self._ended.append(FlushPiece(request_id, none, none.astype(np.float32), none, code))

    def slot_of(self, request_id: int) -> int | None:
        """The slot of a running request; None: it has none."""
        return self._slot_of.get(request_id)

    def idle_slot(self, session: int) -> int | None:
        """The idle slot that keeps this session; None: there is none."""
        return self._idle.get(session)

    def live(self) -> list[int]:
        """The slots that run a request."""
        return list(self._slot_of.values())

    def idle(self) -> list[int]:
        """The slots that idle sessions keep, longest idle first."""
        return list(self._idle.values())

    def release(self, sessions: Iterable[int]) -> list[int]:
        """Ends sessions, and returns the slots that are free because of it."""
        gone = set(sessions)
        freed = [self._idle.pop(session) for session in gone & self._idle.keys()]
        for slot in freed:
            self._give_back(slot)
        self.session[np.isin(self.session, list(gone))] = NO_SESSION
        return freed

    def unsampled(self) -> NDArray[np.bool_]:
        """Slots whose cache no token sampled here depends on [slots]: under other weights their
        next token would carry the new version over entries of the old one, and nobody could tell.
        """
        return self.first_sampled >= self.known

    def forget(self, slots: NDArray[np.bool_]) -> list[int]:
        """Marks all tokens of these slots [slots] as not computed; which they are."""
        self.computed[slots] = 0
        empty = self.computed == 0
        self.weights[empty] = self.numbers[self.adapter[empty]]
        return np.flatnonzero(slots).tolist()

    def record(
        self,
        slots: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        unmodified: NDArray[np.float32],
        experts: NDArray[np.int16] = NO_EXPERTS,
    ) -> None:
        """Appends one sampled token each; `finish` tells whose request that ends."""
        at = self.known[slots]
        self.tokens[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.unmodified[slots, at] = unmodified
        self.versions[slots, at] = self.loaded[self.adapter[slots]]
        if self.experts.size:
            self.experts[slots, at] = experts
        self.known[slots] = at + 1
        stopped = (self.stops[slots] == tokens[:, None]).any(1)
        full = np.where(at + 1 >= self.limit[slots], Finish.LENGTH, Finish.RUNNING)
        self.finish[slots] = np.where(stopped, Finish.STOP, full)

    def drain(self, ended_only: bool = False) -> Flush | None:
        """The tokens since the last drain, each once; None: there are none. `ended_only` leaves out
        requests that still run.
        """
        ended, self._ended = flush_of(self._ended), []
        if ended_only:
            return ended
        live = np.flatnonzero((self.request != NOBODY) & (self.known > self.flushed))
        if not len(live):
            return ended
        start, end = self.flushed[live], self.known[live]
        counts = end - start
        rows = np.repeat(live, counts)
        offsets = np.repeat(start - (np.cumsum(counts) - counts), counts)
        columns = np.arange(len(rows)) + offsets
        self.flushed[live] = end
        growing = Flush(
            ids=self.request[live],
            counts=counts.astype(np.int32),
            tokens=self.tokens[rows, columns].astype(np.int32),
            logprobs=self.logprobs[rows, columns],
            unmodified=self._asked(live, rows, columns),
            versions=self.versions[rows, columns],
            finish=np.full(len(live), Finish.RUNNING, np.int8),
            experts=self.experts[rows, columns] if self.experts.size else NO_EXPERTS,
        )
        return growing if ended is None else joined(ended, growing)

    def _asked(
        self, live: NDArray[np.int64], rows: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        if not self.wants_unmodified[live].any():
            return NO_FLOATS
        asked = self.wants_unmodified[rows]
        return np.where(asked, self.unmodified[rows, columns], np.float32(np.nan))

    def _piece(self, slot: int, code: Finish) -> FlushPiece:
        new = slice(int(self.flushed[slot]), int(self.known[slot]))
        return FlushPiece(
            int(self.request[slot]),
            self.tokens[slot, new].astype(np.int32),
            self.logprobs[slot, new].copy(),
            self.versions[slot, new].copy(),
            code,
            self.unmodified[slot, new].copy() if self.wants_unmodified[slot] else None,
            self.experts[slot, new].copy() if self.experts.size else None,
        )

    def _give_back(self, slot: int) -> None:
        self.session[slot] = NO_SESSION
        heapq.heappush(self._free, slot)

    def _set_stops(self, slot: int, ids: tuple[int, ...]) -> None:
        missing = len(ids) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(ids)] = ids
